"""The portal's pages and states with axe-core, and by keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.portal.pages import PAGES
from tests.support.accessibility import audit
from tests.support.chromium import Chromium, chromium
from tests.support.process import Gateway, configuration, gateway, launched
from tests.support.running import KEY

LONG = "organization/" + "model-with-a-very-long-name-" * 7
RIGHT_TO_LEFT = "שלום/" + "مرحبا-بالعالم"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Chromium]]:
    folder = tmp_path_factory.mktemp("gateway")
    able: dict[str, Any] = {"reasoning-parser": "qwen3"}
    config = configuration(launched(**able), launched(LONG), launched(RIGHT_TO_LEFT), portal=True)
    config["ledger"] = f"sqlite:///{folder / 'usage.db'}"
    config["keys"][0]["limits"] = {"requests_per_minute": 1000, "tokens_per_day": 1_000_000}
    config["models"][0]["price"] = {"prompt": 100, "completion": 500}
    with gateway(folder, config) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield one, browser


def opened(running: tuple[Gateway, Chromium], path: str) -> Chromium:
    one, browser = running
    browser.open("about:blank")
    browser.open(f"{one.url}{path}#key={KEY}")
    browser.wait("document.getElementById('page').hidden === false && !document.getElementById('page').innerText.includes('Loading')")
    return browser


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible(running: tuple[Gateway, Chromium], path: str) -> None:
    audit(opened(running, path))


def test_the_entry_and_a_wrong_key_are_accessible(running: tuple[Gateway, Chromium]) -> None:
    one, browser = running
    browser.open("about:blank")
    browser.evaluate("sessionStorage.clear()")
    browser.open(f"{one.url}/portal#key=sk-wrong")
    browser.wait("document.getElementById('enter-error').textContent")
    audit(browser)


def test_an_error_is_accessible(running: tuple[Gateway, Chromium]) -> None:
    browser = opened(running, "/portal/playground?model=sim/one")
    browser.wait("document.querySelector('.column')")
    browser.evaluate("document.getElementById('tools').value = '[{}]'; document.getElementById('prompt').value = 'Hello'")
    browser.evaluate("document.getElementById('composer').requestSubmit()")
    browser.wait("document.querySelector('.answer .error')?.textContent.length > 10")
    audit(browser)


def test_a_dialog_is_accessible(running: tuple[Gateway, Chromium]) -> None:
    browser = opened(running, "/portal")
    browser.wait("document.querySelectorAll('.card').length === 3")
    browser.evaluate("document.querySelector('.card button').click()")
    browser.wait("document.getElementById('model').open")
    audit(browser)


def test_from_the_url_to_a_response_a_snippet_and_the_remaining_budget_by_keyboard(running: tuple[Gateway, Chromium]) -> None:
    """Eight actions or fewer: each entry of the URL, each key that is pressed and each text that is typed is one."""
    one, browser = running
    browser.resize(1440, 900)
    browser.open("about:blank")
    browser.open(f"{one.url}/portal/playground#key={KEY}")
    browser.wait("document.activeElement.id === 'prompt'")
    browser.type("Hello")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.figures').length === 1")
    assert re.search(r"cost 0\.\d+", browser.text())
    browser.wait(r"/Left: .*[\d,.]+ of 1,000,000 tokens per day/.test(document.getElementById('left').innerText)")
    count = 3
    while browser.evaluate("document.activeElement.id") != "code":
        browser.press("Tab")
        count += 1
    browser.press("Enter")
    browser.wait(
        "document.getElementById('code-dialog').open && document.querySelector('#code-tabs .tabs pre').textContent.startsWith('curl')"
    )
    assert count + 1 <= 8
    audit(browser)


def test_the_first_paint_from_a_warm_gateway(running: tuple[Gateway, Chromium], record_property: Any) -> None:
    browser = opened(running, "/portal")
    opened(running, "/portal")
    browser.wait("performance.getEntriesByName('first-contentful-paint').length")
    paint = browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    record_property("first contentful paint (ms)", paint)
    print(f"first contentful paint: {paint:.0f} ms")
    assert paint > 0
