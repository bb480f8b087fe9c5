"""The page on which people create their own keys: with a session, within the policy of a team, and otherwise with the reason."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.accessibility import audit
from tests.support.chromium import Chromium, chromium
from tests.support.process import Gateway, configuration, gateway, launched

MARKUP = "<img src=x onerror=document.title='owned'>"
LIMITS = {"requests_per_minute": 60}
FIRST_SECRET = "document.querySelector('dialog[open] pre')?.textContent.trim()"


@dataclass
class Seen:
    gateway: Gateway
    browser: Chromium

    def sign_in(self, user: str, team: str) -> None:
        link = self.gateway.command("login-link", "--user", user, "--team", team).stdout.split()[0]
        self.browser.open("about:blank")
        self.browser.open(link)
        self.browser.wait("document.querySelector('form button')")
        self.browser.evaluate("document.querySelector('form button').click()")
        self.browser.wait("!location.pathname.startsWith('/sign-in')")
        self.browser.open(f"{self.gateway.url}/portal/keys")

    def write(self, label: str, text: str) -> None:
        """Fill the field of the dialog whose label begins with this."""
        found = f"[...document.querySelectorAll('dialog[open] label')].find((one) => one.textContent.startsWith({json.dumps(label)}))"
        self.browser.evaluate(f"{found}.querySelector('input').value = {json.dumps(text)}")

    def press(self, name: str) -> None:
        """Click the button with this text or label, in the dialog if one is open."""
        found = "[...(document.querySelector('dialog[open]') ?? document).querySelectorAll('button, a')].find((one) =>"
        named = f"(one.getAttribute('aria-label') ?? one.textContent) === {json.dumps(name)})"
        self.browser.wait(f"{found} {named}")
        self.browser.evaluate(f"{found} {named}.click()")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "session.key").write_text("a session key of more than 32 characters")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    config = configuration(launched(), portal=True, port=port) | {
        "ledger": f"sqlite:///{folder / 'usage.db'}",
        "store": "ledger",
        "sign_in": {"key": {"file": "session.key"}, "url": f"http://127.0.0.1:{port}"},
        "teams": [
            {"id": "open", "self_service": {"max_keys": 2, "max_lifetime": "90d", "models": ["sim/*"], "limits": LIMITS}},
            {"id": "closed"},
        ],
    }
    with gateway(folder, config) as one:
        yield one


@pytest.fixture
def seen(running: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield Seen(running, browser)


def test_the_life_of_a_key(seen: Seen) -> None:
    browser = seen.browser
    seen.sign_in("carol", "open")
    browser.wait("document.body.innerText.includes('You have no keys yet')")
    assert "at most 2 valid keys · each for 90d · for sim/*" in browser.text()
    audit(browser)
    seen.press("Create a key")
    audit(browser)
    seen.write("Name", MARKUP)
    seen.write("Valid for days", "10")
    browser.evaluate("document.querySelector('dialog[open] details').open = true")
    assert browser.evaluate("document.querySelector('dialog[open] [name=requests_per_minute]').placeholder") == "at most 60"
    audit(browser)
    seen.write("Tokens per day", "1,000")
    seen.write("Requests per minute", "61")
    seen.press("Create")
    browser.wait("document.querySelector('dialog[open] .error').textContent.includes('at most 60')")
    seen.write("Requests per minute", "many")
    seen.press("Create")
    browser.wait("document.querySelector('dialog[open] .error').textContent === 'Requests per minute: expected a number.'")
    seen.write("Requests per minute", "6")
    seen.press("Create")
    browser.wait(f"{FIRST_SECRET}?.startsWith('sk-')")
    secret = browser.evaluate(FIRST_SECRET)
    audit(browser)
    seen.press("Close")
    assert secret not in browser.evaluate("document.documentElement.outerHTML")
    assert (
        MARKUP in browser.text()
        and "You have one valid key." in browser.text()
        and "6 requests per minute, 1,000 tokens per day" in browser.text()
        and "not yet" in browser.text()
    )
    audit(browser)

    seen.press(f"Rename {MARKUP}")
    seen.write("Name", "Laptop")
    seen.press("Rename")
    seen.press("Rotate Laptop")
    seen.press("Rotate")
    browser.wait(f"{FIRST_SECRET}?.startsWith('sk-')")
    assert browser.evaluate(FIRST_SECRET) != secret and "valid for 7d" in browser.text()
    seen.press("Use it in this tab")
    browser.wait("document.querySelector('.column') && document.getElementById('account').textContent === 'carol'")
    browser.evaluate("document.getElementById('prompt').value = 'Hello'; document.getElementById('composer').requestSubmit()")
    browser.wait("document.querySelectorAll('.figures').length === 1")

    browser.open(f"{seen.gateway.url}/portal/keys")
    seen.press("Revoke Laptop")
    seen.press("Revoke")
    browser.wait("document.querySelector('.state.revoked')")
    seen.press("Delete Laptop")
    seen.press("Delete")
    browser.wait("document.body.innerText.includes('You have no keys yet')")
    assert [each for each in browser.complaints if "status of 40" not in each] == [], (
        "only the first page has no key, and one limit is refused"
    )
    assert {each for each in browser.requests if not each.startswith(seen.gateway.url)} <= {"about:blank"}


def test_a_refusal_is_shown_in_the_words_of_the_gateway(seen: Seen) -> None:
    seen.sign_in("dave", "open")
    seen.press("Create a key")
    seen.write("Name", "Laptop")
    seen.write("Valid for days", "400")
    seen.press("Create")
    seen.browser.wait("document.querySelector('dialog[open] .error').textContent.includes('expires')")
    audit(seen.browser)


def test_a_team_without_a_policy_is_explained(seen: Seen) -> None:
    seen.sign_in("erin", "closed")
    seen.browser.wait("document.body.innerText.includes('The operator of the gateway creates the keys of your teams')")
    assert seen.browser.evaluate("document.getElementById('create').hidden")


def test_a_person_signs_in_and_out(seen: Seen) -> None:
    browser = seen.browser
    browser.open(f"{seen.gateway.url}/portal/keys")
    browser.wait("document.querySelector('#keys-note a')?.getAttribute('href') === '/sign-in?return_to=/portal/keys'")
    audit(browser)
    seen.sign_in("frank", "open")
    browser.open(f"{seen.gateway.url}/portal")
    browser.wait("document.getElementById('no-key').innerText === 'No key? Create one.'")
    seen.press("Sign out")
    browser.wait("location.pathname === '/sign-out' && document.querySelector('form button')")
    browser.evaluate("document.querySelector('form button').click()")
    browser.wait("document.body.innerText.includes('signed out')")
    browser.open(f"{seen.gateway.url}/portal/keys")
    browser.wait("document.querySelector('#keys-note a')")


def test_without_a_sign_in_the_page_names_the_operator(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        gateway(tmp_path_factory.mktemp("gateway"), configuration(launched(), portal=True)) as one,
        chromium(tmp_path_factory.mktemp("chromium")) as browser,
    ):
        browser.open(f"{one.url}/portal/keys")
        browser.wait("document.body.innerText.includes('so its operator creates the keys')")
        audit(browser)
