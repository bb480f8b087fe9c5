"""A page of the console or the portal that stays open: it says that it is stale, and recovers without a reload."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.access.actor import Role
from gateway.sign_in.browser import Port
from gateway.sign_in.sessions import new_session
from tests.gateway.self_service.stage import SESSION_KEY, free_ports, person, session_cookie
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
    sign_in = {"key": {"file": "session.key"}, "url": f"http://127.0.0.1:{data}", "admin_url": f"http://127.0.0.1:{admin}"}
    config |= {"store": "sqlite:///keys.db", "sign_in": sign_in, "teams": [{"id": "lab", "self_service": {"max_keys": 2}}]}
    (folder / "session.key").write_text(SESSION_KEY)
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


def use_session(seen: Console, port: Port, *, has_expired: bool = False) -> None:
    """Give the browser the cookie of a session of this port."""
    session = new_session(person("carol", "lab", role=Role.ADMIN, issuer=""), time.time())
    if has_expired:
        session = replace(session, created=session.created - 90_000, seen=session.seen - 90_000)
    ((name, value),) = session_cookie(session, port).items()
    seen.browser.set_cookie(seen.gateway.url if port == "data" else seen.url, name, value)


@pytest.mark.parametrize("path", ["/console", "/console/requests?status=errors", "/console/system"])
def test_a_session_that_has_expired(seen: Console, path: str) -> None:
    """The person signs in again in another tab, and returns to this one."""
    show(seen, "/console/system")
    seen.browser.evaluate("sessionStorage.clear()")
    use_session(seen, "admin")
    seen.browser.open("about:blank")
    seen.browser.open(seen.url + path)
    seen.wait("!document.getElementById('page').hidden && document.getElementById('account').textContent.startsWith('link:carol')")
    seen.browser.evaluate("window.same = true")
    use_session(seen, "admin", has_expired=True)
    seen.browser.evaluate("document.getElementById('clear')?.click()")  # the page of requests does not refresh itself
    seen.browser.forward(60)
    seen.wait("document.getElementById('enter-error').textContent === 'Your session has ended. Sign in again.'")
    assert seen.browser.evaluate("document.getElementById('page').hidden")
    link = seen.browser.evaluate("new URL(document.querySelector('#or-sign-in a').href).searchParams.get('return_to')")
    assert link == seen.browser.evaluate("location.pathname + location.search")
    seen.browser.evaluate("window.dispatchEvent(new Event('focus'))")
    assert seen.browser.evaluate("document.getElementById('page').hidden"), "nothing has changed"
    use_session(seen, "admin")
    seen.browser.evaluate("window.dispatchEvent(new Event('focus'))")
    seen.wait("!document.getElementById('page').hidden && document.getElementById('enter').hidden")
    assert seen.browser.evaluate("window.same"), "the page was loaded again"


def test_a_session_of_the_portal_that_has_expired(seen: Console) -> None:
    use_session(seen, "data")
    seen.browser.open("about:blank")
    seen.browser.open(f"{seen.gateway.url}/portal/keys")
    seen.wait_for_text("You have no keys yet")
    seen.browser.evaluate("window.same = true; document.getElementById('create').click()")
    use_session(seen, "data", has_expired=True)
    seen.browser.evaluate("document.querySelector('dialog[open] input').value = 'Laptop'")
    seen.browser.evaluate("document.querySelector('dialog[open] form').requestSubmit()")
    seen.wait("/sign in/i.test(document.querySelector('dialog[open] .error').textContent)")
    seen.browser.evaluate("document.querySelector('dialog[open]').close()")
    seen.browser.evaluate("window.dispatchEvent(new Event('focus'))")
    seen.wait_for_text("Your session has ended. Sign in to see and create your keys.")
    assert seen.browser.evaluate("document.getElementById('create').hidden && document.getElementById('sign-out').hidden")
    use_session(seen, "data")
    seen.browser.evaluate("window.dispatchEvent(new Event('focus'))")
    seen.wait_for_text("You have no keys yet")
    assert seen.browser.evaluate("window.same && !document.getElementById('create').hidden")


@pytest.mark.parametrize("path", ["/console", "/console/models", "/portal"])
def test_a_restart_of_the_gateway(seen: Console, folder: Path, path: str) -> None:
    """The last test of this file: the first of these stops the gateway of the others."""
    seen.gateway.stop()
    with gateway(folder, None, ready=False) as before:
        wait_for(lambda: before.get("/readyz").status_code == 200, 60)
        show(seen, path)
    seen.browser.forward(60)
    seen.wait_for_text(STALE)
    with gateway(folder, None, ready=False) as again:
        wait_for(lambda: again.get("/readyz").status_code == 200, 60)
        seen.browser.forward(60)
        recovers(seen, path)
