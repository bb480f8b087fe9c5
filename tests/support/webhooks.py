"""Run a receiver of webhooks that remembers what it gets, and refuses a seeded share of the requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.http_server import threaded

_FAILURES = (500, 503, 429, 302, None)  # None: the connection is closed without a response


@dataclass
class Receiver:
    """A receiver. ``share`` of the requests fail, ``accepted`` has the others. ``attempts`` has all, with their headers in lowercase."""

    share: float
    random: random.Random
    reply: bytes = b"ok"
    url: str = ""
    accepted: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def status(self, headers: dict[str, str], body: bytes) -> int | None:
        self.attempts.append((headers, body))
        if self.random.random() < self.share:
            return self.random.choice(_FAILURES)
        self.accepted.append(json.loads(body))
        return 200

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """The accepted notices by ID, as a receiver has them that ignores known IDs."""
        return {each["id"]: each for each in reversed(self.accepted)}

    def subjects(self, event: str = "budget.threshold") -> Sequence[str]:
        """Return the subjects of the accepted notices, each ID once."""
        return sorted(each["subject"] for each in self.known.values() if each["event"] == event)


@contextmanager
def receiver(share: float = 0.0, seed: int = 0, path: str = "/hook", reply: bytes = b"ok") -> Iterator[Receiver]:
    """Run a receiver for the length of the block."""
    made = Receiver(share, random.Random(seed), reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = made.status({name.lower(): value for name, value in self.headers.items()}, body) if self.path == path else 404
            if status is None:
                self.close_connection = True
                return
            self.send_response(status)
            if status == 302:
                self.send_header("location", made.url)
            self.send_header("content-length", str(len(made.reply)))
            self.end_headers()
            self.wfile.write(made.reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with threaded(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        made.url = f"http://127.0.0.1:{server.server_port}{path}"
        yield made
