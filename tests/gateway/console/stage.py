"""A gateway with everything that the pages of keys, teams, people and usage show, and a browser for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from gateway.auth.keys import hash_of
from tests.gateway.self_service.stage import SESSION_KEY, free_ports
from tests.support.chromium import Chromium, chromium
from tests.support.console import TOKENS
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY

HOSTILE = "<img/src=x/onerror=document.title='owned'>"
MARKUP = "<script>document.title='owned'</script> مفتاح"


@dataclass
class Console:
    """The console of a gateway in a browser."""

    gateway: Gateway
    browser: Chromium

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin}"

    def send(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Send a request with the token of the admin."""
        headers = {"authorization": f"Bearer {TOKENS['admin']}", "if-match": "*"}
        return httpx2.request(method, self.url + path, headers=headers, timeout=60, **more)

    def create(self, path: str, **fields: Any) -> dict[str, Any]:
        response = self.send("POST", path, json=fields)
        assert response.status_code == 201, response.text
        made: dict[str, Any] = response.json()
        return made

    def open(self, path: str, role: str = "admin") -> None:
        """Open a page, and wait until it has its data."""
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}{path}#key={TOKENS[role]}")
        self.browser.wait("document.getElementById('page').hidden === false && !document.body.innerText.includes('Loading')", 60)

    def click(self, text: str, within: str = "#page") -> None:
        """Click the button with this text."""
        found = f"[...document.querySelectorAll({f'{within} button'!r})].find((one) => one.textContent === {text!r})"
        self.browser.wait(found)
        self.browser.evaluate(f"{found}.click()")

    def fill(self, label: str, value: str) -> None:
        """Fill the input of the open dialog that has this label."""
        labels = "[...[...document.querySelectorAll('dialog[open]')].at(-1).querySelectorAll('label')]"
        found = f"{labels}.find((one) => one.textContent.startsWith({json.dumps(label)}))"
        write = f"const one = {found}.querySelector('input, select, textarea'); one.value = {json.dumps(value)}"
        self.browser.evaluate(f"(() => {{ {write}; one.dispatchEvent(new Event('input', {{bubbles: true}})); }})()")

    def submit(self) -> None:
        self.browser.evaluate("[...document.querySelectorAll('dialog[open] form')].at(-1).requestSubmit()")

    def shows(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.browser.wait(f"document.body.innerText.includes({json.dumps(text)})", 60)

    def buttons(self) -> list[str]:
        """Return the buttons of the page."""
        shown = "[...document.querySelectorAll('#page button')].filter((one) => one.offsetParent).map((one) => one.textContent)"
        found: list[str] = self.browser.evaluate(shown)
        return found

    def check(self) -> None:
        """Check that nothing was executed, blocked, or requested from another host, and that the page is not wider than its window."""
        ours = (self.url, self.gateway.url, "data:", "blob:", "about:")
        assert {each for each in self.browser.requests if not each.startswith(ours)} == set()
        assert [each for each in self.browser.complaints if "the server responded with a status of 4" not in each] == []
        assert self.browser.evaluate("document.title") != "owned"
        assert self.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def check_width(self, path: str, width: int) -> None:
        """Check a page in a window of this width."""
        self.browser.resize(width, 900)
        self.open(path)
        self.check()
        self.browser.resize(1440, 900)


@contextmanager
def console(folder: Path, **more: Any) -> Iterator[Console]:
    """Run a gateway with a store, a ledger and a sign-in, and a browser. ``more`` replaces settings; None removes one."""
    folder.mkdir(exist_ok=True)
    (folder / "session.key").write_text(SESSION_KEY)
    data, admin = free_ports(2)
    tokens = [{"name": role, "hash": hash_of(token), "role": role} for role, token in TOKENS.items()]
    config = configuration(launched() | {"price": {"prompt": 1.0}}, port=data, admin={"port": admin, "tokens": tokens}, workers=1)
    config["keys"][0] |= {"team": "lab", "labels": {"cost_center": MARKUP}, "limits": {"tokens_per_day": 1_000_000}}
    config["teams"] = [{"id": "lab", "limits": {"cost_per_month": 100}}]
    sign_in = {"key": {"file": "session.key"}, "url": f"http://127.0.0.1:{data}", "admin_url": f"http://127.0.0.1:{admin}"}
    config |= {"ledger": {"url": "sqlite:///usage.db", "user": True}, "store": "ledger", "sign_in": sign_in, **more}
    config = {name: value for name, value in config.items() if value is not None}
    with gateway(folder, config) as one, chromium(folder) as browser:
        wait_for(lambda: one.get("/readyz").json()["status"] == "ready", 60, why=lambda: one.output)
        yield Console(one, browser)


def use(one: Gateway, token: str = KEY, user: str = MARKUP) -> int:
    """Send a request, and return its status."""
    body = {"model": "sim/one", "user": user, "max_tokens": 20, "messages": [{"role": "user", "content": "hello " * 60}]}
    headers = {"authorization": f"Bearer {token}"}
    return httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code
