"""The pages of the console: shells without data, with a strict policy, and the tab's token as the only way in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest

from gateway.console.pages import PAGES, START
from tests.support.chromium import Chromium, chromium
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

TOKEN = "the-token-of-an-administrator"
MOST_BYTES = 150_000


@dataclass
class Seen:
    gateway: Gateway
    browser: Chromium

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin}"

    def wait(self, expression: str) -> None:
        wait_for(lambda: self.browser.evaluate(f"Boolean({expression})"), why=lambda: f"{self.browser.complaints}\n{self.browser.text()}")

    def open(self, path: str, token: str = "") -> None:
        self.browser.open("about:blank")
        self.browser.open(self.url + path + (f"#key={token}" if token else ""))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "token").write_text(TOKEN)
    config = configuration(launched(), admin={"port": 0, "token": {"file": "token"}})
    with gateway(folder, config) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield Seen(one, browser)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_a_shell_of_bounded_size_with_a_strict_policy(seen: Seen, path: str) -> None:
    response = httpx2.get(seen.url + path, timeout=30)
    assert response.status_code == 200 and len(response.content) < MOST_BYTES
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "sim/" not in response.text and TOKEN not in response.text


def test_the_root_leads_to_the_console_and_an_unknown_page_does_not_exist(seen: Seen) -> None:
    assert httpx2.get(seen.url, timeout=30, follow_redirects=True).url.path == START
    unknown = httpx2.get(f"{seen.url}{START}/nothing", headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)
    assert (unknown.status_code, unknown.json()) == (404, {"error": "the console has no such page"})


def test_a_wrong_token_is_refused_with_the_reason_and_forgotten(seen: Seen) -> None:
    seen.open(START)
    seen.wait("document.getElementById('enter')?.hidden === false")
    assert seen.browser.evaluate("document.getElementById('enter-error').textContent") == ""
    seen.browser.evaluate("document.getElementById('key').value = 'wrong'")
    seen.browser.evaluate("document.getElementById('enter-form').requestSubmit()")
    seen.wait("document.getElementById('enter-error').textContent.includes('token')")
    assert seen.browser.evaluate("sessionStorage.length") == 0


def test_the_token_of_a_fragment_is_in_this_tab_only_and_is_forgotten(seen: Seen) -> None:
    seen.open(START, TOKEN)
    seen.wait("document.getElementById('page')?.hidden === false")
    assert seen.browser.evaluate("location.href") == seen.url + START
    assert seen.browser.evaluate("[localStorage.length, document.cookie].join()") == "0,"
    assert seen.browser.evaluate("document.getElementById('account').textContent") == "token · admin"
    seen.browser.evaluate("document.getElementById('leave').click()")
    seen.wait("document.getElementById('page').hidden")
    assert seen.browser.evaluate("sessionStorage.length") == 0


def confirm(seen: Seen, act: str) -> None:
    """Open the dialog of an action and confirm it."""
    texts = {"title": "Stop it", "words": "One stream ends.", "button": "Stop", "command": "vllm-gateway stop x"}
    seen.browser.evaluate(f"confirmAction({{...{json.dumps(texts)}, act: {act}}})")
    seen.wait("document.querySelector('dialog[open]')")
    shown = seen.browser.evaluate("document.querySelector('dialog').innerText")
    assert all(text in shown for text in texts.values())
    seen.browser.evaluate("document.querySelector('dialog form').requestSubmit()")


def test_an_action_is_confirmed_in_words_and_says_what_it_did(seen: Seen) -> None:
    seen.open(START, TOKEN)
    seen.wait("document.getElementById('page')?.hidden === false")
    confirm(seen, "async () => 'Stopped <b>x</b>.'")
    seen.wait("document.querySelector('.toast')?.textContent === 'Stopped <b>x</b>.' && !document.querySelector('dialog')")
    confirm(seen, "async () => { throw new ApiError(409, 'it is stopped') }")
    seen.wait("document.querySelector('dialog .error').textContent === 'it is stopped'")
    seen.browser.evaluate("document.querySelector('dialog form > .row button[type=button]').click()")
    confirm(seen, "async () => el('p', {}, 'sk-shown-once')")
    seen.wait("document.querySelector('dialog')?.innerText.includes('sk-shown-once')")


def test_a_table_is_offered_as_csv_in_which_nothing_is_a_formula(seen: Seen) -> None:
    seen.open(START, TOKEN)
    seen.wait("document.getElementById('page')?.hidden === false")
    seen.browser.evaluate(
        "saved = null; URL.createObjectURL = (blob) => { blob.text().then((text) => { saved = text }); return 'blob:x' }; 1"
    )
    seen.browser.evaluate("HTMLAnchorElement.prototype.click = () => {}; 1")
    columns = "[{title: 'a', value: (row) => row[0]}, {title: 'b', value: (row) => row[1], text: (row) => row[1]}]"
    seen.browser.evaluate(f"""saveCsv('x.csv', {columns}, [['=1+1', -2], ['say "x", y', null]]); 1""")
    seen.wait("saved")
    assert seen.browser.evaluate("saved") == 'a,b\r\n\'=1+1,-2\r\n"say ""x"", y",'
