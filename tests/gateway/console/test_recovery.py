"""A page of the console or the portal that stays open: it says that it is stale, and recovers without a reload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.self_service.stage import free_ports
from tests.support.chromium import chromium
from tests.support.console import TOKENS, Console, admin_tokens, written
from tests.support.process import configuration, gateway, launched, wait_for
from tests.support.running import KEY

STALE = "The gateway does not respond. This page tries again by itself."
PAGES = {
    "/console": "Ready",
    "/console/models": "sim/one",
    "/console/queue": "Waiting now",
    "/console/system": "Workers",
    "/portal": "sim/one",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def seen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    data, admin = free_ports(2)
    config: dict[str, Any] = configuration(launched(), port=data, portal=True, admin={"port": admin, "tokens": admin_tokens()})
    with chromium(tmp_path_factory.mktemp("chromium")) as browser, gateway(folder, config, ready=False) as one:
        wait_for(lambda: one.get("/readyz").status_code == 200, 60)
        browser.control_clock()
        yield Console(one, browser)


def show(seen: Console, path: str) -> None:
    """Open a page, and wait until it has its data."""
    seen.browser.open("about:blank")
    portal = path.startswith("/portal")
    seen.browser.open(f"{seen.gateway.url if portal else seen.url}{path}#key={KEY if portal else TOKENS['admin']}")
    seen.wait_for_text(PAGES[path])
    seen.browser.evaluate("window.same = true")


def recovers(seen: Console, path: str) -> None:
    seen.wait("document.getElementById('lost').hidden")
    seen.wait_for_text(PAGES[path])
    assert seen.browser.evaluate("window.same"), "the page was loaded again"


@pytest.mark.parametrize("path", PAGES)
def test_a_lost_network(seen: Console, path: str) -> None:
    show(seen, path)
    seen.browser.disconnect(is_offline=True)
    try:
        seen.browser.forward(60)
        seen.wait_for_text(STALE)
        assert PAGES[path] in seen.browser.text()
    finally:
        seen.browser.disconnect(is_offline=False)
    seen.browser.forward(60)
    recovers(seen, path)


@pytest.mark.parametrize("path", PAGES)
def test_an_hour_passes(seen: Console, path: str) -> None:
    show(seen, path)
    seen.browser.forward(3600)
    before = len(seen.browser.requests)
    seen.browser.forward(60)
    recovers(seen, path)
    if path != "/console":  # it follows a stream
        wait_for(lambda: seen.browser.text() and len(seen.browser.requests) > before)  # requests are reported during a call


def test_a_token_that_has_expired(seen: Console) -> None:
    show(seen, "/console/models")
    file = seen.gateway.folder / "gateway.yaml"
    before = file.read_text()
    written(file, ("name: an-admin\n", "name: an-admin\n      expires: 2020-01-01\n"))
    wait_for(lambda: seen.call("GET", "/status").status_code == 401)
    seen.browser.forward(60)
    seen.wait("!document.getElementById('enter').hidden && document.getElementById('enter-error').textContent")
    assert seen.browser.evaluate("sessionStorage.length") == 0
    file.write_text(before)
    wait_for(lambda: seen.call("GET", "/status").status_code == 200)
    seen.browser.evaluate(f"document.getElementById('key').value = {TOKENS['admin']!r}")
    seen.browser.evaluate("document.getElementById('enter-form').requestSubmit()")
    seen.wait("!document.getElementById('page').hidden")
    recovers(seen, "/console/models")


def test_a_restart_of_the_gateway(seen: Console, folder: Path) -> None:
    show(seen, "/console/models")
    seen.gateway.stop()
    seen.browser.forward(60)
    seen.wait_for_text(STALE)
    with gateway(folder, None, ready=False) as again:
        wait_for(lambda: again.get("/readyz").status_code == 200, 60)
        seen.browser.forward(60)
        recovers(seen, "/console/models")
