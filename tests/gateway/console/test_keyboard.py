"""Tasks of an operator by keyboard alone, from the URL and the token. Each test prints the number of keys that were pressed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest

from tests.gateway.console.stage import Console, console, use
from tests.support.console import TOKENS
from tests.support.process import wait_for

MOST_TABS = 60


@dataclass
class Keyboard:
    """The keys of an operator. A typed or pasted text counts as one action."""

    seen: Console
    actions: int = 0

    def press(self, key: str) -> None:
        self.seen.browser.press(key)
        self.actions += 1

    def enter(self) -> None:
        """Open the console, and paste the token into the focused field."""
        self.seen.browser.evaluate("sessionStorage.clear()")
        self.seen.browser.open(f"{self.seen.url}/console")
        self.seen.browser.wait("document.activeElement.id === 'key'")
        self.seen.browser.type(TOKENS["admin"])
        self.press("Enter")
        self.seen.browser.wait("!document.getElementById('page').hidden")

    def choose(self, condition: str) -> None:
        """Press Tab until a condition of the focused element ``at`` is true, then Enter."""
        focused = f"((at) => Boolean({condition}))(document.activeElement)"
        for _ in range(MOST_TABS):
            self.press("Tab")
            if self.seen.browser.evaluate(focused):
                break
        else:
            pytest.fail(f"no Tab leads to {condition}")
        self.press("Enter")

    def choose_text(self, text: str) -> None:
        self.choose(f"at.textContent.trim() === {json.dumps(text)}")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console")) as made:
        yield made


def test_find_why_a_request_failed(seen: Console) -> None:
    body = {"model": "sim/wrong", "messages": [{"role": "user", "content": "Hello"}]}
    token = seen.create("/admin/v1/keys", id="asks")["secret"]
    response = httpx2.post(f"{seen.gateway.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)
    identity = response.headers["x-request-id"]
    wait_for(lambda: seen.send("GET", f"/admin/v1/requests/{identity}").status_code == 200)
    keyboard = Keyboard(seen)
    keyboard.enter()
    keyboard.choose_text("Requests")
    seen.shows(identity)
    keyboard.choose_text("Show rejected")
    seen.browser.wait("location.search.includes('rejected')")
    keyboard.choose_text(identity)
    seen.browser.wait("document.querySelector('.cause.bad')")
    print(f"the cause of a failed request: {keyboard.actions} actions")
    assert keyboard.actions < 80


def test_stop_the_key_that_burns_the_budget(seen: Console) -> None:
    token = seen.create("/admin/v1/keys", id="burner", limits={"tokens_per_day": 500})["secret"]
    assert use(seen.gateway, token) == 200
    keyboard = Keyboard(seen)
    keyboard.enter()
    keyboard.choose_text("Keys")
    seen.shows("burner")
    keyboard.choose("at.textContent.trim() === 'burner'")
    seen.browser.wait("location.search.includes('burner')")
    seen.shows("Revoke")
    keyboard.choose("at.textContent.startsWith('Revoke')")
    seen.browser.wait("document.querySelector('dialog[open]')")
    keyboard.choose("at.matches('dialog form button.danger')")
    wait_for(lambda: use(seen.gateway, token) == 401)
    print(f"the key that burns the budget is stopped: {keyboard.actions} actions")
    assert keyboard.actions < 80
