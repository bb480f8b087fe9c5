"""Every page of the console with axe-core, as an admin and as a viewer."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from gateway.auth import keys
from gateway.console.pages import PAGES
from tests.support.accessibility import audit
from tests.support.chromium import Chromium, chromium
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

LONG, RIGHT_TO_LEFT = "a-very-long-name-" * 11, "مفتاح-שלום"
TOKENS = {"admin": "the-token-of-an-admin", "viewer": "the-token-of-a-viewer"}
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Chromium]]:
    folder = tmp_path_factory.mktemp("gateway")
    tokens = [{"name": role, "hash": keys.hash_of(token), "role": role} for role, token in TOKENS.items()]
    config = configuration(launched(), admin={"port": 0, "tokens": tokens}) | {"ledger": "sqlite:///usage.db", "store": "ledger"}
    config["teams"] = [{"id": "research", "limits": {"tokens_per_day": 100_000}}]
    config["keys"][0] |= {"team": "research", "limits": {"requests_per_minute": 60}}
    with gateway(folder, config) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        assert one.request().status_code == 200
        mine = {"authorization": f"Bearer {TOKENS['viewer']}"}
        wait_for(lambda: httpx2.get(f"http://127.0.0.1:{one.admin}/usage", headers=mine, timeout=30).json()["usage"])
        yield one, browser


def opened(running: tuple[Gateway, Chromium], path: str, role: str = "admin") -> Chromium:
    one, browser = running
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{one.admin}{path}#key={TOKENS[role]}")
    browser.wait("document.getElementById('page').hidden === false && !document.getElementById('page').innerText.includes('Loading')")
    return browser


@pytest.mark.parametrize("role", TOKENS)
@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible(running: tuple[Gateway, Chromium], path: str, role: str) -> None:
    audit(opened(running, path, role))


@pytest.mark.parametrize("error", ["new TypeError('Failed to fetch')", "new ApiError(503, 'the database does not respond')"])
def test_an_error_is_accessible(running: tuple[Gateway, Chromium], error: str) -> None:
    browser = opened(running, "/console/models")
    browser.evaluate(f"load(() => {{ throw {error}; }})")
    browser.wait("document.getElementById('lost').hidden === false")
    audit(browser)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Chromium]]:
    """A gateway with 10,000 keys, long names and names from right to left, and without ledger, store and audit log."""
    folder = tmp_path_factory.mktemp("full")
    tokens = [{"name": role, "hash": keys.hash_of(token), "role": role} for role, token in TOKENS.items()]
    names = (LONG, RIGHT_TO_LEFT)
    config = configuration(
        *({"id": name, "servers": [{"url": "http://127.0.0.1:9"}]} for name in names), admin={"port": 0, "tokens": tokens}
    )
    config["teams"] = [{"id": name, "limits": {"tokens_per_day": 100_000}} for name in names]
    config["keys"] += [{"id": name, "hash": keys.hash_of(name), "team": name} for name in names]
    entries = (f"- {{id: key-{number}, hash: {keys.hash_of(str(number))}}}\n" for number in range(10_000))
    (folder / "keys.yaml").write_text("".join(entries))
    config["keys_file"] = "keys.yaml"
    with gateway(folder, config, ready=False, seconds=120) as one, chromium(tmp_path_factory.mktemp("chromium")) as browser:
        wait_for(lambda: one.get("/livez").status_code == 200, 120, why=lambda: one.output)
        yield one, browser


@pytest.mark.parametrize("path", PAGES)
def test_a_page_with_many_rows_and_long_names_or_without_data_is_accessible(full: tuple[Gateway, Chromium], path: str) -> None:
    audit(opened(full, path))


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_a_bounded_size(running: tuple[Gateway, Chromium], path: str) -> None:
    one, _ = running
    response = httpx2.get(f"http://127.0.0.1:{one.admin}{path}", timeout=30)
    assert response.status_code == 200 and len(response.content) < MOST_BYTES


def test_the_entry_is_accessible(running: tuple[Gateway, Chromium]) -> None:
    one, browser = running
    browser.open("about:blank")
    browser.open(f"http://127.0.0.1:{one.admin}/console#key=wrong")
    browser.wait("document.getElementById('enter-error').textContent")
    audit(browser)
