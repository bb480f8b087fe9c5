"""The portal as a person with a key uses it: in Chromium, with a wrong key, a stream, tools, limits, and names that look like markup."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.portal.pages import PAGES
from tests.clients import install
from tests.support.chromium import Chromium, chromium
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY, model, serving
from tests.support.wire import request, request_once

IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
HOSTILE = "sim/<img/src=x/onerror=document.title='owned'>"
MARKUP = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
MOST_BYTES = 100_000
EMBEDDING = launched("sim/embedding") | {"task": "embedding", "capabilities": []}


@dataclass
class Seen:
    gateway: Gateway
    browser: Chromium

    def open(self, path: str, key: str = KEY) -> None:
        self.browser.open("about:blank")
        self.browser.open(f"{self.gateway.url}{path}#key={key}")

    def wait(self, expression: str) -> None:
        self.browser.wait(expression)

    def click(self, selector: str) -> None:
        self.wait(f"document.getElementById('page')?.hidden === false && document.querySelector({selector!r})")
        self.browser.evaluate(f"document.querySelector({selector!r}).click()")

    def write(self, identity: str, text: str) -> None:
        self.browser.evaluate(f"document.getElementById({identity!r}).value = {json.dumps(text)}")

    def send(self, text: str) -> None:
        """Send a message, and wait for the whole response."""
        self.wait("document.querySelector('.column')")
        self.write("prompt", text)
        self.browser.evaluate("document.getElementById('composer').requestSubmit()")
        self.wait("document.querySelectorAll('.figures').length && document.getElementById('send').textContent === 'Send'")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("gateway")
    able: dict[str, Any] = {"reasoning-parser": "qwen3", "enable-auto-tool-choice": True, "tool-call-parser": "qwen3_coder"}
    config = configuration(launched(**able), launched(HOSTILE), EMBEDDING, portal=True) | {"ledger": f"sqlite:///{folder / 'usage.db'}"}
    config["models"][0]["price"] = {"prompt": 100, "completion": 500}
    config["keys"][0]["limits"] = {"requests_per_minute": 1000, "tokens_per_day": 1_000_000}
    with gateway(folder, config) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield Seen(one, browser)


@pytest.fixture(autouse=True)
def no_complaint(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which the browser has an error, or asked another host."""
    yield
    if "seen" in request.fixturenames:
        seen: Seen = request.getfixturevalue("seen")
        refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
        assert [each for each in seen.browser.complaints if each != refused] == []
        assert {each for each in seen.browser.requests if not each.startswith((seen.gateway.url, "data:", "blob:", "about:"))} == set()


def test_a_wrong_key_is_refused_with_the_reason_and_forgotten(seen: Seen) -> None:
    seen.browser.open(seen.gateway.url + "/")
    seen.wait("document.getElementById('enter')?.hidden === false")
    seen.write("key", "sk-wrong")
    seen.browser.evaluate("document.getElementById('enter-form').requestSubmit()")
    seen.wait("document.getElementById('enter-error').textContent")
    assert "key" in seen.browser.text().lower()
    assert seen.browser.evaluate("sessionStorage.length") == 0


def test_the_key_of_a_fragment_is_in_this_tab_only(seen: Seen) -> None:
    seen.open("/portal")
    seen.wait("document.querySelectorAll('.card').length === 3")
    assert seen.browser.evaluate("location.href") == f"{seen.gateway.url}/portal"
    assert seen.browser.evaluate("[localStorage.length, document.cookie].join()") == "0,"
    seen.click("#leave")
    assert seen.browser.evaluate("sessionStorage.length") == 0


def test_the_models_of_the_key_and_code_for_each(seen: Seen) -> None:
    seen.open("/portal")
    seen.wait("document.querySelectorAll('.card').length === 3")
    assert HOSTILE in seen.browser.text() and "tools, reasoning" in seen.browser.text()
    seen.click(".card:nth-child(2) button")
    assert "100 prompt · 500 completion per 1M tokens" in seen.browser.text() and "ready" in seen.browser.text()
    export, *shown = seen.browser.evaluate("[...document.querySelectorAll('#model-code pre')].map((one) => one.textContent)")
    assert export == f"export VLLM_GATEWAY_KEY='{KEY[:6]}…'"
    assert len(shown) == 4 and all(seen.gateway.url in each and KEY not in each for each in shown)
    assert seen.browser.evaluate("document.title") == "Models · vllm-gateway"


def test_the_whole_key_is_copied_also_without_tls(seen: Seen) -> None:
    seen.open("/portal")
    seen.click(".card button")
    # A page of http://HOST has no clipboard, but copies a selection.
    seen.browser.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    seen.browser.evaluate("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
    seen.click("#model-code .copy")
    seen.wait("window.copied")
    assert seen.browser.evaluate("window.copied") == f"export VLLM_GATEWAY_KEY='{KEY}'\n"
    assert seen.browser.evaluate("[document.querySelectorAll('textarea').length, document.activeElement.textContent].join()") == "0,Copied"


def test_the_shown_code_runs_unchanged(seen: Seen, tmp_path: Path) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column')")
    seen.write("prompt", 'It\'s "a" $HOME `test` \\n مفتاح')
    seen.write("system", "Be brief.")
    seen.write("parameter-temperature", "0.5")
    seen.browser.evaluate(f"attach({IMAGE!r}, 'dot.png')")
    seen.click("#tools-example")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.querySelector('.call') && document.getElementById('send').textContent === 'Send'")
    seen.browser.evaluate("document.querySelector('.call textarea').value = 'Sunny'")
    seen.click(".call button")
    seen.wait("document.querySelectorAll('.figures').length === 2 && document.getElementById('send').textContent === 'Send'")
    seen.click("#code")
    panels = "[...document.querySelectorAll('#code-tabs [role=tabpanel]')].map((one) => one.textContent.replace(/^Copy/, ''))"
    curl, python, _, anthropic = seen.browser.evaluate(panels)
    environment = os.environ | {"VLLM_GATEWAY_KEY": KEY}
    programs = {"curl": (["bash"], curl), "python": ([sys.executable], python)}
    current = install.environment("current")
    if install.installed(current, install.LOCKS / "current.lock"):
        programs["anthropic"] = ([str(current / "bin" / "python")], anthropic)
    for name, (program, text) in programs.items():
        file = tmp_path / name
        file.write_text(text)
        ran = subprocess.run([*program, str(file)], env=environment, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and '"error"' not in ran.stdout and ran.stdout.strip(), (name, ran)


def test_a_streamed_response_with_its_figures(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.send("Hello")
    figures = seen.browser.evaluate("document.querySelector('.figures').textContent")
    assert re.fullmatch(
        r"\d+ prompt and \d+ completion tokens · cost 0\.\d+ in the operator's currency · first token after \d+ ms"
        r"( · \d+ tokens per second)?",
        figures,
    )
    assert seen.browser.evaluate("document.querySelector('.reasoning').open") is False
    seen.wait("/^Left: .* of 1,000,000 tokens per day/.test(document.getElementById('left').textContent)")


def test_two_models_respond_beside_each_other_and_a_message_is_edited(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column')")
    seen.write("other", HOSTILE)
    seen.browser.evaluate("document.getElementById('other').dispatchEvent(new Event('change'))")
    seen.send("Hello")
    seen.wait("document.querySelectorAll('.figures').length === 2")
    seen.click(".asked .actions button")
    assert seen.browser.evaluate("document.getElementById('prompt').value") == "Hello"
    assert seen.browser.evaluate("document.querySelectorAll('.message').length") == 0


def test_stop_ends_the_request(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column')")
    seen.write("parameter-max_tokens", "20000")
    seen.write("prompt", "Write a long story.")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.getElementById('send').textContent === 'Stop' && document.querySelector('.answer').textContent.length > 40")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.querySelector('.answer .error')?.textContent === 'Stopped.'")
    wait_for(lambda: 'vllm_gateway_inflight_requests{model="sim/one"} 0' in seen.gateway.get("/metrics").text)


def test_an_error_of_the_gateway_is_shown_in_its_words(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column')")
    seen.write("tools", '[{"type": "function"}]')
    seen.write("prompt", "Hello")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.querySelector('.answer .error')?.textContent.length > 10")
    seen.browser.complaints[:] = [each for each in seen.browser.complaints if "status of 400" not in each]


def test_settings_that_are_not_json_are_named_and_nothing_is_sent(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column')")
    seen.write("schema", "{")
    seen.write("prompt", "Hello")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.getElementById('settings-error').textContent.startsWith('JSON schema: ')")
    assert seen.browser.evaluate("document.getElementById('prompt').value") == "Hello"
    seen.write("schema", "")
    seen.send("Hello")
    assert seen.browser.evaluate("document.querySelectorAll('.asked').length") == 1


def test_enter_sends_and_only_escape_stops(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.activeElement.id === 'prompt'")
    seen.write("parameter-max_tokens", "20000")
    seen.browser.type("Write a long story.")
    seen.browser.press("Enter")
    seen.wait("document.getElementById('send').textContent === 'Stop'")
    assert seen.browser.evaluate("document.getElementById('prompt').value") == ""
    seen.browser.type("Next")
    seen.browser.press("Enter")
    assert seen.browser.evaluate("document.getElementById('send').textContent") == "Stop"
    seen.browser.press("Escape")
    seen.wait("document.querySelector('.answer .error')?.textContent === 'Stopped.'")
    assert seen.browser.evaluate("document.getElementById('prompt').value") == "Next"


def test_a_lost_network_is_named_in_words(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column') && document.getElementById('left').textContent")
    seen.browser.disconnect(is_offline=True)
    seen.write("prompt", "Hello")
    seen.browser.evaluate("document.getElementById('composer').requestSubmit()")
    seen.wait("document.querySelector('.answer .error')?.textContent.startsWith('The gateway does not respond')")
    seen.wait("!document.getElementById('lost').hidden")
    seen.browser.disconnect(is_offline=False)
    seen.wait("document.getElementById('lost').hidden")
    seen.browser.complaints[:] = [each for each in seen.browser.complaints if "ERR_INTERNET_DISCONNECTED" not in each]


def test_an_image_can_be_removed(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.wait("document.querySelector('.column')")
    seen.browser.evaluate(f"attach({IMAGE!r}, 'dot.png')")
    seen.wait("document.getElementById('image-name').textContent === 'Remove dot.png'")
    seen.click("#image-name")
    seen.send("Hello")
    assert seen.browser.evaluate("document.querySelectorAll('.asked img').length") == 0


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("# A *title*", "h3 > em"),
        ("1. one\n2. two", "ol > li:nth-child(2)"),
        ("a `b` **c**", "p > code + strong"),
        ("```py\nx = 1\n```", ".code pre"),
        ("| a | b |\n|---|---|\n| 1 | 2 |", "tbody td"),
        ("[a](https://example.com/)", 'a[href="https://example.com/"][rel~="noopener"]'),
    ],
)
def test_markdown_becomes_elements(seen: Seen, text: str, selector: str) -> None:
    seen.open("/portal/playground")
    seen.wait("document.querySelector('.column')")
    made = f"el('div', {{}}, ...markdown({json.dumps(text)}))"
    assert seen.browser.evaluate(f"{made}.querySelector({json.dumps(selector)}) !== null")


@pytest.mark.parametrize("text", [MARKUP, f"# {MARKUP}", f"- {MARKUP}", f"`{MARKUP}`", f"| {MARKUP} |\n|---|\n| x |", f"```\n{MARKUP}\n```",
                                  "[x](javascript:alert(1))", "[x](data:text/html,x)"])  # fmt: skip
def test_markup_in_a_response_is_text(seen: Seen, text: str) -> None:
    seen.open("/portal/playground")
    seen.wait("document.querySelector('.column')")
    made = f"(() => {{ const one = el('div', {{}}, ...markdown({json.dumps(text)})); document.body.append(one); return one; }})()"
    assert seen.browser.evaluate(f"{made}.querySelectorAll('script, img, a').length") == 0
    assert seen.browser.evaluate("document.title") == "Playground · vllm-gateway"


def test_usage_and_limits_have_numbers_and_words(seen: Seen) -> None:
    seen.open("/portal/playground?model=sim/one")
    seen.send("Hello")
    wait_for(lambda: seen.gateway.get("/usage").json()["usage"])
    seen.open("/portal/usage")
    seen.wait("document.querySelector('.limits') && document.querySelector('#usage tbody td')")
    assert "of 1,000,000 used" in seen.browser.text()
    assert seen.browser.evaluate("document.querySelectorAll('.chart rect').length") == 60


def test_the_connection_is_tested(seen: Seen) -> None:
    seen.open("/portal/connect")
    seen.wait("document.querySelectorAll('#connect-model option').length")
    assert seen.browser.evaluate("[...document.querySelectorAll('#connect-model option')].map((one) => one.value)") == ["sim/one", HOSTILE]
    seen.click("#connect-test")
    seen.wait("document.getElementById('connect-result').textContent.startsWith('It works')")
    assert KEY not in seen.browser.text()


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_a_shell_of_bounded_size_with_a_strict_policy(seen: Seen, path: str) -> None:
    response = httpx2.get(seen.gateway.url + path, timeout=30)
    assert response.status_code == 200 and len(response.content) < MOST_BYTES
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "sim/" not in response.text and "team-a" not in response.text


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("width", [390, 1440])
def test_a_page_is_not_wider_than_the_window(seen: Seen, path: str, width: int) -> None:
    seen.browser.resize(width, 800)
    seen.open(path)
    seen.wait("document.getElementById('page').hidden === false")
    assert seen.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dates_of_the_usage_stay_on_one_line_of_a_phone(seen: Seen) -> None:
    seen.browser.resize(390, 800)
    seen.open("/portal/playground?model=sim/one")
    seen.send("Hello")
    wait_for(lambda: seen.gateway.get("/usage").json()["usage"])
    seen.open("/portal/usage")
    seen.wait("document.querySelector('#usage tbody th')")
    assert seen.browser.evaluate("document.querySelector('#usage tbody th').offsetHeight") < 50


def test_programs_at_the_root_get_json(seen: Seen) -> None:
    assert httpx2.get(seen.gateway.url, timeout=30).json()["error"]["code"] == "not_found"
    browser = httpx2.get(seen.gateway.url, headers={"accept": "text/html"}, timeout=30, follow_redirects=False)
    assert (browser.status_code, browser.headers["location"]) == (303, "/portal")
    assert httpx2.post(seen.gateway.url + "/portal", timeout=30).status_code == 405


@pytest.mark.parametrize("path", ["/", *PAGES])
async def test_without_the_setting_nothing_is_served(path: str) -> None:
    async with serving([model(1)]) as served:
        reply = await request_once(served.port, request(b"", path, method="GET", token=None))
        assert reply.status == 404
