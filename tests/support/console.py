"""The console as an operator uses it: a gateway whose admin port requires tokens, and a browser with a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth.keys import hash_of
from tests.support.chromium import Chromium, chromium
from tests.support.process import Gateway, gateway, wait_for

MARKUP = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
TOKENS = {role: f"token-of-{role}" for role in ("viewer", "operator", "admin")}


def admin_tokens() -> list[dict[str, str]]:
    """Return ``server.admin.tokens`` with a token for each role."""
    return [{"name": f"an-{role}", "hash": hash_of(token), "role": role} for role, token in TOKENS.items()]


def responded(method: str, url: str, **more: Any) -> httpx2.Response:
    """Send a request. A stream of events does not end, so its events are not read."""
    with httpx2.stream(method, url, timeout=60, **more) as response:
        if response.headers.get("content-type", "").partition(";")[0] != "text/event-stream":
            response.read()
        return response


@dataclass
class Console:
    """A running gateway and a browser."""

    gateway: Gateway
    browser: Chromium

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin}"

    def call(self, method: str, path: str, role: str = "admin", **more: Any) -> httpx2.Response:
        """Send a request with the token of a role."""
        headers = {"authorization": f"Bearer {TOKENS[role]}"}
        return httpx2.request(method, self.url + path, headers=headers, timeout=60, **more)

    def open(self, path: str, role: str = "admin") -> None:
        """Open a page with the token of a role."""
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}{path}#key={TOKENS[role]}")
        self.wait("document.getElementById('page')?.hidden === false")

    def wait(self, expression: str) -> None:
        """Wait until an expression of the page is true."""
        wait_for(lambda: self.browser.evaluate(f"Boolean({expression})"), why=lambda: f"{self.browser.complaints}\n{self.browser.text()}")

    def wait_for_text(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.wait(f"document.body.innerText.includes({json.dumps(text)})")

    def click(self, selector: str) -> None:
        """Click on an element once it is there and shown."""
        self.wait(f"document.querySelector({selector!r})?.checkVisibility()")
        self.browser.evaluate(f"document.querySelector({selector!r}).click()")

    def buttons(self) -> list[str]:
        """Return the visible buttons of the page's content."""
        return list(
            self.browser.evaluate("[...document.querySelectorAll('#page button')].filter(b=>b.checkVisibility()).map(b=>b.textContent)")
        )

    def fits(self) -> None:
        """Check that the page does not scroll sideways on a phone or a wide screen, in light or dark."""
        for width in (390, 1440):
            for scheme in ("dark", "light"):
                self.browser.resize(width, 900)
                self.browser.prefer(scheme)
                assert self.browser.evaluate("document.documentElement.scrollWidth") <= width


@contextmanager
def console(folders: pytest.TempPathFactory, config: dict[str, Any]) -> Iterator[Console]:
    """Run a gateway with a token for each role, and a browser."""
    config["server"]["admin"]["tokens"] = admin_tokens()
    with gateway(folders.mktemp("gateway"), config, ready=False) as one, chromium(folders.mktemp("chromium")) as browser:
        wait_for(lambda: one.get("/readyz").status_code == 200, 60, why=lambda: one.output)
        yield Console(one, browser)


def check_quiet(seen: Console, *allowed: str) -> None:
    """Check that the browser has no error and asked no other host. ``allowed`` are parts of errors that a test has caused."""
    unexpected = [each for each in seen.browser.complaints if not any(text in each for text in allowed)]
    assert not unexpected, unexpected
    assert {each for each in seen.browser.requests if not each.startswith((seen.url, "data:", "blob:", "about:"))} == set()
    assert "owned" not in str(seen.browser.evaluate("document.title"))


def written(file: Path, *changes: tuple[str, str]) -> None:
    """Change texts in a file."""
    text = file.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(text)
    fresh.replace(file)
