"""A page in a real browser that chats by ``fetch``. Its origin differs from the gateway's origin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.clients.overloaded import serving
from tests.clients.visit import Visit, visiting
from tests.support.chromium import chromium

PAGE = Path(__file__).parent / "page.html"


class Site:
    """The page's own server: it serves the task and receives the results. ``port`` is open before the task is known."""

    def __init__(self) -> None:
        self.port = 0
        self.task: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.reported = threading.Event()

    def read(self, origin: str, folder: Path) -> dict[str, Any]:
        """Open the page under this origin in a browser. Return the page's report."""
        self.reported.clear()
        with chromium(folder) as browser:
            browser.open(origin)
            assert self.reported.wait(100), browser.complaints
        return self.results


@contextmanager
def site() -> Iterator[Site]:
    """Serve the page on an ephemeral port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            task = self.path == "/task"
            self._respond("application/json" if task else "text/html", json.dumps(one.task).encode() if task else PAGE.read_bytes())

        def do_POST(self) -> None:
            one.results = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._respond("text/plain", b"")
            one.reported.set()

        def _respond(self, kind: str, data: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    one = Site()
    with serving(Handler) as one.port:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Visit]]:
    with site() as one:
        origin = f"http://127.0.0.1:{one.port}"
        with visiting(tmp_path_factory.mktemp("gateway"), ("browser", "curl"), cors={"origins": [origin]}) as visit:
            one.task = visit.task("browser")
            yield one, visit


def test_a_page_of_a_known_origin_chats(page: tuple[Site, Visit], tmp_path: Path) -> None:
    """Because of the key, each request needs a preflight. The page can also read errors and Retry-After."""
    site, visit = page
    results = site.read(f"http://127.0.0.1:{site.port}", tmp_path)
    stream = results["stream"]
    assert (stream["text"], stream["last"]) == (visit.spoken(), "[DONE]") and stream["pieces"] > 1
    assert stream["request"].startswith("req_")
    assert results["wrong_key"] == {"status": 401, "code": "invalid_api_key"}
    assert results["again"] == {"status": 429, "retryAfter": "1", "code": "rate_limit_exceeded"}
    assert results["cancel"] == {"pieces": 3}
    entry = visit.ended_early("browser")
    assert (entry["outcome"], entry["ended"] < results["ended"]) == ("disconnected", True)


def test_a_page_of_another_origin_is_refused(page: tuple[Site, Visit], tmp_path: Path) -> None:
    """The same page under another host name gets no permission, so the browser sends no request."""
    site, visit = page
    before = len(visit.journal())
    results = site.read(f"http://localhost:{site.port}", tmp_path)
    assert all(results[case] == {"failed": "TypeError: Failed to fetch"} for case in ("cancel", "stream", "wrong_key", "again"))
    assert [entry["path"] for entry in visit.journal()[before:] if entry["method"] == "POST"] == []
