"""The sign-in of a whole gateway: workers check sessions, control runs the routes, and a sign-out holds in every process."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from gateway.access.actor import Role
from gateway.config import ConfigurationError, load
from gateway.sign_in.browser import Port
from gateway.sign_in.sessions import Person, Sessions, new_session
from gateway.snapshot.snapshot import SessionRules
from tests.support.oidc_issuer import CLIENT, OidcIssuer, oidc_issuer
from tests.support.ports import refusing
from tests.support.postgres import Postgres
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write

KEY = "a session key of more than 32 characters"
ALICE = {"name": "Alice", "role": "admin", "teams": ["lab"], "owned_teams": []}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def with_sign_in(issuer: str, data: int, admin: int, **more: Any) -> dict[str, Any]:
    sign_in = {
        "key": {"file": "session.key"}, "url": f"http://127.0.0.1:{data}", "admin_url": f"http://127.0.0.1:{admin}",
        "roles": {"admin": "llm-admins"},
        "issuers": [{"id": "one", "issuer": issuer, "client_id": CLIENT, "client_secret": {"file": "client.secret"},
                     "claims": {"roles": "groups", "teams": "groups"}}],
    }  # fmt: skip
    config = configuration(launched(), port=data, admin={"port": admin}, workers=2)
    return config | {"ledger": "sqlite:///usage.db", "teams": [{"id": "lab"}], "sign_in": sign_in, **more}


def secrets(folder: Path) -> None:
    (folder / "session.key").write_text(KEY)
    (folder / "client.secret").write_text("the secret/of the client")


@pytest.fixture(scope="module")
def issuer() -> Iterator[OidcIssuer]:
    with oidc_issuer() as running:
        yield running


@pytest.fixture(scope="module")
def running(issuer: OidcIssuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    secrets(folder)
    with gateway(folder, with_sign_in(issuer.url, *free_ports(2))) as one:
        yield one


@pytest.fixture
def browser() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, timeout=60) as made:
        yield made


def sign_in(running: Gateway, browser: httpx2.Client, issuer: OidcIssuer, port: int, **claims: Any) -> httpx2.Response:
    started = browser.get(f"http://127.0.0.1:{port}/sign-in")
    assert started.status_code == 303, started.text
    return browser.get(issuer.approve(started.headers["location"], **{"groups": ["lab", "llm-admins"], "name": "Alice", **claims}))


def people(cookies: dict[str, str], port: int) -> list[Any]:
    """Return the person of the session over several new connections, so that each worker responds."""
    found = []
    for _ in range(8):
        with httpx2.Client(trust_env=False, timeout=60, cookies=cookies) as one:
            response = one.get(f"http://127.0.0.1:{port}/sign-in/session")
            found.append(response.json() if response.status_code == 200 else None)
    return found


@pytest.mark.parametrize("port", ["data", "admin"])
def test_a_session_holds_in_every_worker_and_so_does_its_end(
    running: Gateway, browser: httpx2.Client, issuer: OidcIssuer, port: str
) -> None:
    number = getattr(running, port)
    assert sign_in(running, browser, issuer, number).status_code == 303
    cookies = dict(browser.cookies)
    assert people(dict(browser.cookies), number) == [ALICE] * 8
    origin = f"http://127.0.0.1:{number}"
    assert browser.post(f"{origin}/sign-out", data={"a": "b"}).status_code == 403
    assert browser.post(f"{origin}/sign-out", headers={"origin": origin}, data={"a": "b"}).status_code == 200
    assert people(cookies, number) == [None] * 8, "the response comes after every worker knows it"


@pytest.mark.parametrize("port_of_logout", ["data", "admin"])
def test_a_logout_of_the_issuer_holds_on_both_ports(
    running: Gateway, browser: httpx2.Client, issuer: OidcIssuer, port_of_logout: str
) -> None:
    for port in (running.data, running.admin):
        assert sign_in(running, browser, issuer, port, sid=f"of {port_of_logout}").status_code == 303
    url = f"http://127.0.0.1:{getattr(running, port_of_logout)}/back-channel-logout"
    assert httpx2.post(url, data={"logout_token": issuer.logout_token(sid=f"of {port_of_logout}")}, timeout=60).status_code == 200
    assert people(dict(browser.cookies), running.data) == people(dict(browser.cookies), running.admin) == [None] * 8


def test_a_restarted_worker_knows_what_was_revoked(running: Gateway, browser: httpx2.Client, issuer: OidcIssuer) -> None:
    origin = f"http://127.0.0.1:{running.data}"
    sign_in(running, browser, issuer, running.data)
    cookies = dict(browser.cookies)
    browser.post(f"{origin}/sign-out", headers={"origin": origin}, data={})
    before = running.workers()
    for pid in before.values():
        os.kill(pid, 9)
    wait_for(lambda: len(running.workers()) == 2 and not {*running.workers().values()} & {*before.values()})
    wait_for(lambda: running.request().status_code == 200)
    assert people(cookies, running.data) == [None] * 8


def test_a_person_operates_the_gateway_from_a_page_of_the_admin_port_only(
    running: Gateway, browser: httpx2.Client, issuer: OidcIssuer
) -> None:
    origin = f"http://127.0.0.1:{running.admin}"
    sign_in(running, browser, issuer, running.admin)
    for headers in ({}, {"origin": "https://evil.example.com"}, {"origin": origin, "sec-fetch-site": "cross-site"}):
        assert browser.post(f"{origin}/reload", headers=headers).status_code == 403
    assert browser.post(f"{origin}/reload", headers={"origin": origin, "sec-fetch-site": "same-origin"}).status_code == 200
    wait_for(lambda: "reload requested by the person one:alice, from 127.0.0.1" in running.output)
    with httpx2.Client(trust_env=False, timeout=60) as viewer:
        sign_in(running, viewer, issuer, running.admin, groups=["lab"], sub="bob")
        assert viewer.post(f"{origin}/reload", headers={"origin": origin}).status_code == 403


def cookie_of(port: Port, *, seen: int = 0) -> dict[str, str]:
    """Return a session's cookie that was last renewed ``seen`` seconds ago."""
    now = time.time()
    session = new_session(Person("", "link", "dave", "Dave", Role.VIEWER, ("lab",)), now)
    written = Sessions(SessionRules(KEY.encode(), False, 28_800, 86_400, ("",)), port, ()).write(replace(session, seen=int(now) - seen))
    return {written.partition("=")[0]: written.partition("=")[2].partition(";")[0]}


@pytest.mark.parametrize(("port", "path"), [("data", "/sign-in/session"), ("admin", "/sign-in/session"), ("admin", "/status")])
def test_use_renews_a_session(running: Gateway, port: Port, path: str) -> None:
    url = f"http://127.0.0.1:{getattr(running, port)}{path}"
    assert "set-cookie" not in httpx2.get(url, cookies=cookie_of(port, seen=60), timeout=60).headers
    assert "session=" in httpx2.get(url, cookies=cookie_of(port, seen=3600), timeout=60).headers["set-cookie"]
    assert "set-cookie" not in httpx2.get(url, cookies=cookie_of(port, seen=28_800), timeout=60).headers


def test_no_session_is_valid_until_the_revoked_ones_are_known(tmp_path: Path) -> None:
    """A session that was revoked must not become valid by a restart while the database is unavailable."""
    secrets(tmp_path)
    data, admin = free_ports(2)
    with refusing() as closed:
        ledger = f"postgresql://user@127.0.0.1:{closed}/none"
        with gateway(tmp_path, with_sign_in("http://127.0.0.1:1", data, admin, ledger=ledger)) as one:
            assert people(cookie_of("data"), data) == [None] * 8
            assert one.request().status_code == 200
            origin = f"http://127.0.0.1:{data}"
            link = httpx2.post(f"{origin}/sign-in/link", data={"token": "a"}, headers={"origin": origin}, timeout=60)
            assert link.status_code == 503
            assert "no session is valid until they are known" in one.output


def test_a_logout_holds_on_every_gateway(server: Postgres, issuer: OidcIssuer, tmp_path: Path) -> None:
    ledger = server.database()
    with ExitStack() as stack:
        gateways = []
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            secrets(folder)
            gateways.append(stack.enter_context(gateway(folder, with_sign_in(issuer.url, *free_ports(2), ledger=ledger))))
        browser = stack.enter_context(httpx2.Client(trust_env=False, timeout=60))
        sign_in(gateways[0], browser, issuer, gateways[0].data, sid="both")
        wait_for(lambda: people(dict(browser.cookies), gateways[1].data) == [ALICE] * 8)
        url = f"http://127.0.0.1:{gateways[0].data}/back-channel-logout"
        assert httpx2.post(url, data={"logout_token": issuer.logout_token(sid="both")}, timeout=60).status_code == 200
        assert people(dict(browser.cookies), gateways[0].data) == [None] * 8
        wait_for(lambda: people(dict(browser.cookies), gateways[1].data) == [None] * 8)


def test_a_login_link_signs_a_person_in_once(running: Gateway, browser: httpx2.Client) -> None:
    made = running.command("login-link", "--user", "carol", "--role", "viewer", "--team", "lab")
    assert (made.returncode, made.stderr) == (0, "")
    data, admin = made.stdout.split()
    assert (urlsplit(data).port, urlsplit(admin).port) == (running.data, running.admin)
    page = browser.get(data)
    assert page.status_code == 200 and "Sign in as carol" in page.text
    origin, token = f"http://127.0.0.1:{running.data}", urlsplit(data).query.removeprefix("token=")
    used = browser.post(f"{origin}/sign-in/link", data={"token": token}, headers={"origin": origin})
    assert used.status_code == 303 and people(dict(browser.cookies), running.data)[0]["name"] == "carol"
    assert browser.get(admin).status_code == 403
    assert token not in running.output + running.log


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--user", "carol", "--role", "root"], "role is not one of viewer, operator, admin"),
        (["--user", "carol", "--team", "none"], "there is no team none"),
        (["--user", "carol"], "a link needs a role or a team"),
        (["--user", "two words", "--role", "viewer"], "user must be a name"),
        (["--user", "a\x1b[31m", "--role", "viewer"], "user must be a name"),
    ],
)
def test_a_login_link_without_a_valid_grant_is_refused(running: Gateway, arguments: list[str], text: str) -> None:
    made = running.command("login-link", *arguments)
    assert made.returncode == 1 and text in made.stderr


def test_links_are_not_made_over_the_admin_port_without_a_role(running: Gateway, browser: httpx2.Client, issuer: OidcIssuer) -> None:
    origin = f"http://127.0.0.1:{running.admin}"
    path = f"{origin}/admin/v1/sign-in-links?user=mallory&role=admin"
    assert browser.post(path, headers={"origin": origin}).status_code == 403
    sign_in(running, browser, issuer, running.admin, groups=["lab"])
    assert browser.post(path, headers={"origin": origin}).status_code == 403


def test_a_large_form_is_refused_and_the_port_stays_usable(running: Gateway) -> None:
    origin = f"http://127.0.0.1:{running.data}"
    response = httpx2.post(f"{origin}/back-channel-logout", data={"logout_token": "a" * 100_000}, timeout=60)
    assert response.status_code == 413
    assert httpx2.get(f"{origin}/health", timeout=60).status_code == 200


def test_the_routes_do_not_exist_without_the_setting(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as plain:
        for port in (plain.data, plain.admin):
            for path in ("/sign-in", "/sign-in/session", "/sign-in/callback/one"):
                assert httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=60).status_code == 404
        made = plain.command("login-link", "--user", "carol", "--role", "viewer")
        assert made.returncode == 1 and "sign_in is not configured" in made.stderr


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"key": {"env": "SHORT"}}, "fewer than 32 characters"),
        ({"url": None, "admin_url": None}, "set url, admin_url, or both"),
        ({"url": "https://llm.example.com/path"}, "expected an address with no path"),
        ({"issuers": [{"id": "link"}]}, "which means sign-in links"),
        ({"issuers": [{"id": "../x"}]}, "expected an ID of lowercase letters"),
        ({"issuers": [{"claims": {}}]}, "no person could sign in there"),
        ({"issuers": [{"scopes": "profile"}]}, "must contain openid"),
        ({"issuers": [{"algorithms": ["HS256"]}]}, "algorithms"),
        ({"issuers": [{}, {}]}, "issuer"),
        ({"roles": None}, "maps no value to a role"),
    ],
)
def test_a_mistake_in_the_settings_is_found(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    secrets(tmp_path)
    config = with_sign_in("https://login.example.com", 8000, 9090)
    issuers = [config["sign_in"]["issuers"][0] | each for each in change.pop("issuers", [{}])]
    config["sign_in"] |= {"issuers": issuers, **change}
    write(tmp_path / "gateway.yaml", config)
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path / "gateway.yaml", {"SHORT": "x" * 31})
    assert problem in str(refused.value) and "x" * 31 not in str(refused.value)


def test_a_sign_in_needs_a_database(tmp_path: Path) -> None:
    secrets(tmp_path)
    write(tmp_path / "gateway.yaml", with_sign_in("https://login.example.com", 8000, 9090, ledger=None))
    with pytest.raises(ConfigurationError, match="requires a database"):
        load(tmp_path / "gateway.yaml", {})


def test_the_key_is_no_environment_of_launched_servers(running: Gateway) -> None:
    for process in running.named("upstream.simulator"):
        assert KEY not in subprocess.run(["cat", f"/proc/{process.pid}/environ"], capture_output=True, text=True).stdout
