"""A client with few rights acts on the admin port. The routes come from its table, so a new one is covered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.permissions import PERMISSIONS
from gateway.api.routes import ROUTES
from gateway.auth.keys import hash_of
from tests.gateway.sign_in.test_gateway import free_ports, secrets, sign_in, with_sign_in
from tests.gateway.sign_in.test_routes import FOREIGN
from tests.support.console import responded
from tests.support.oidc_issuer import OidcIssuer, oidc_issuer
from tests.support.process import Gateway, gateway, wait_for
from tests.support.running import KEY

ADMIN = {"authorization": "Bearer token-of-admin"}
READING = ("GET", "HEAD")
PATHS = {
    "/metrics/servers/{server:path}": "/metrics/servers/sim%2Fone%230",
    "/models/{id:path}/{operation}": "/models/sim%2Fone/stop",
    "/servers/{server:path}/{server_operation}": "/servers/sim%2Fone%230/cordon",
    "/admin/v1/keys/{id:path}/{key_operation}": "/admin/v1/keys/of-ops/rotate",
    "/admin/v1/keys/{id:path}": "/admin/v1/keys/of-ops",
    "/admin/v1/keys/{id:path}/raises": "/admin/v1/keys/of-ops/raises",
    "/admin/v1/teams/{id:path}": "/admin/v1/teams/ops",
    "/admin/v1/teams/{id:path}/raises": "/admin/v1/teams/ops/raises",
    "/admin/v1/people/{id}/sessions": "/admin/v1/people/x/sessions",
    "/admin/v1/requests/{id}": "/admin/v1/requests/req_x",
    "/admin/v1/requests/{id}/record": "/admin/v1/requests/req_x/record",
    "/admin/v1/months/{month}": "/admin/v1/months/2026-01",
    "/admin/v1/months/{month}/close": "/admin/v1/months/2026-01/close",
    "/console/{page}": "/console/keys",
    "/console/docs/{document:path}": "/console/docs/",
    "/admin/v1/sign-in-links": "/admin/v1/sign-in-links?user=mallory&role=admin",
}
"""The paths of routes with parameters. Targets are of the team ``ops``."""
GUARDED = {route: permission for route, permission in PERMISSIONS.items() if permission.role is not None}
CHANGING = {route: permission for route, permission in GUARDED.items() if route[0] not in READING}


@pytest.fixture(scope="module")
def issuer() -> Iterator[OidcIssuer]:
    with oidc_issuer() as running:
        yield running


@pytest.fixture(scope="module")
def one(issuer: OidcIssuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("attacked")
    secrets(folder)
    (folder / "audit.secret").write_text("a-secret-of-the-audit-log")
    config = with_sign_in(issuer.url, *free_ports(2), store="ledger", audit={"secret": {"file": "audit.secret"}, "file": "audit.jsonl"})
    config["teams"] = [{"id": "lab"}, {"id": "ops"}]
    config["sign_in"]["roles"] |= {"viewer": "viewers", "operator": "operators"}
    config["sign_in"]["issuers"][0]["claims"] |= {"owned_teams": "owns"}
    config["server"]["admin"]["tokens"] = [
        {"name": "root", "hash": hash_of("token-of-admin"), "role": "admin"},
        {"name": "former", "hash": hash_of("token-that-expired"), "role": "admin", "expires": "2020-01-01"},
    ]
    with gateway(folder, config, ready=False) as running:
        wait_for(lambda: running.request().status_code == 200, 60, why=lambda: running.output)
        assert call(running, "POST", "/admin/v1/keys", ADMIN, content='{"id": "of-ops", "team": "ops"}').status_code == 201
        yield running


def call(
    one: Gateway,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    *,
    content: str = "",
    cookies: dict[str, str] | None = None,
) -> httpx2.Response:
    url = f"http://127.0.0.1:{one.admin}{PATHS.get(path, path)}"
    sent = {"if-match": "*", **(headers or {})}
    return responded(method, url, content=content, headers=sent, cookies=cookies)


def signed_in(one: Gateway, issuer: OidcIssuer, port: int, **claims: Any) -> dict[str, str]:
    """Sign a person in, and return the cookies."""
    with httpx2.Client(trust_env=False, timeout=60) as browser:
        assert sign_in(one, browser, issuer, port, **claims).status_code == 303
        return dict(browser.cookies)


def state(one: Gateway) -> Any:
    """Return what an attack on the admin port could have changed."""
    shown = call(one, "GET", "/status", ADMIN).json()
    models = [(model["id"], model["state"], [server.get("cordoned") for server in model["servers"]]) for model in shown["models"]]
    entries = [call(one, "GET", path, ADMIN).json() for path in ("/admin/v1/keys", "/admin/v1/teams")]
    return models, entries


def here(one: Gateway) -> dict[str, str]:
    """Return the headers of a request from a page of the admin port."""
    return {"origin": f"http://127.0.0.1:{one.admin}", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_person_uses_only_the_routes_of_the_own_role(one: Gateway, issuer: OidcIssuer, role: str) -> None:
    cookies, before = signed_in(one, issuer, one.admin, groups=[f"{role}s"]), state(one)
    allowed = {"viewer": ("viewer",), "operator": ("viewer", "operator")}[role]
    for (method, path), permission in GUARDED.items():
        if permission.role not in allowed:
            assert call(one, method, path, here(one), cookies=cookies).status_code == 403, (method, path)
    assert state(one) == before


def test_an_owner_of_another_team_uses_no_route(one: Gateway, issuer: OidcIssuer) -> None:
    """Neither a route for the whole gateway, nor one for an entry of the team ``ops``."""
    cookies, before = signed_in(one, issuer, one.admin, groups=[], owns=["lab"]), state(one)
    for (method, path), permission in GUARDED.items():
        if not permission.owner or "{" in path:
            response = call(one, method, path, here(one), cookies=cookies)
            expected = (403, 404) if permission.owner else (403,)
            assert response.status_code in expected, (method, path, response.text)
            assert "of-ops" not in response.text.replace("there is no key of-ops in the store", ""), "as for a missing key"
    assert state(one) == before


def test_a_member_of_a_team_uses_no_route(one: Gateway, issuer: OidcIssuer) -> None:
    cookies = signed_in(one, issuer, one.admin, groups=["lab"])
    assert {call(one, method, path, here(one), cookies=cookies).status_code for method, path in GUARDED} == {403}


TOKEN = "token-of-admin"
QUERY = f"token={TOKEN}&access_token={TOKEN}&authorization=Bearer%20{TOKEN}"
COOKIES = {"authorization": f"Bearer {TOKEN}", "token": TOKEN, "vllm-gateway-admin-session": TOKEN}
PRESENTED: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "nothing": ("", {}, {}),
    "in the query": (QUERY, {}, {}),
    "in another header": ("", {"x-api-key": TOKEN, "x-admin-token": TOKEN, "proxy-authorization": f"Bearer {TOKEN}", "api-key": TOKEN}, {}),
    "in a cookie": ("", {}, COOKIES),
    "with another scheme": ("", {"authorization": f"Basic {TOKEN}"}, {}),
    "without a scheme": ("", {"authorization": TOKEN}, {}),
    "its hash": ("", {"authorization": f"Bearer {hash_of(TOKEN)}"}, {}),
    "its start": ("", {"authorization": f"Bearer {TOKEN[:-1]}"}, {}),
    "an expired one": ("", {"authorization": "Bearer token-that-expired"}, {}),
    "a key of the data port": ("", {"authorization": f"Bearer {KEY}"}, {}),
}
"""Query, headers and cookies."""


@pytest.mark.parametrize("attack", PRESENTED)
def test_only_a_valid_token_in_its_place_authenticates(one: Gateway, attack: str) -> None:
    query, headers, cookies = PRESENTED[attack]
    for method, path in GUARDED:
        joined = PATHS.get(path, path)
        response = call(one, method, f"{joined}{'&' if '?' in joined else '?'}{query}", headers, cookies=cookies)
        assert response.status_code == 401, (method, path, response.text)
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_refusal_does_not_show_why_a_token_is_refused(one: Gateway, method: str) -> None:
    tokens = ("wrong", "token-that-expired", TOKEN[:-1], hash_of(TOKEN))
    refusals = [call(one, method, "/admin/v1/keys", {"authorization": f"Bearer {token}"}) for token in tokens]
    assert {(each.status_code, each.content, each.headers["content-type"]) for each in refusals} == {
        (401, b'{"error":"the admin port requires its token"}', "application/json")
    }


def test_a_session_does_not_replace_a_token_that_is_refused(one: Gateway, issuer: OidcIssuer) -> None:
    cookies = signed_in(one, issuer, one.admin)
    assert call(one, "GET", "/status", cookies=cookies).status_code == 200
    assert call(one, "GET", "/status", {"authorization": "Bearer wrong"}, cookies=cookies).status_code == 401
    assert call(one, "POST", "/reload", {"authorization": "Bearer wrong"}, cookies=cookies).status_code == 401


def test_a_session_of_the_data_port_has_no_rights(one: Gateway, issuer: OidcIssuer) -> None:
    """Also under the name of the admin port's cookie."""
    (value,) = (value for name, value in signed_in(one, issuer, one.data).items() if "session" in name)
    for name in ("vllm-gateway-session", "vllm-gateway-admin-session"):
        assert {call(one, method, path, cookies={name: value}).status_code for method, path in GUARDED} == {401}


@pytest.mark.parametrize("headers", FOREIGN)
def test_another_page_cannot_use_a_session(one: Gateway, issuer: OidcIssuer, headers: str) -> None:
    """Every route that changes something, with the session of an admin."""
    cookies, before = signed_in(one, issuer, one.admin), state(one)
    sent = {name: value.replace("HERE", here(one)["origin"]) for name, value in FOREIGN[headers].items()}
    for method, path in CHANGING:
        response = call(one, method, path, sent, cookies=cookies)
        assert response.status_code in (401, 403), (method, path)
    assert state(one) == before


def test_another_page_reads_nothing(one: Gateway, issuer: OidcIssuer) -> None:
    cookies = signed_in(one, issuer, one.admin)
    for method, path in GUARDED.keys() - CHANGING.keys():
        sent = {"origin": "https://evil.example.com", "sec-fetch-site": "cross-site"}
        headers = call(one, method, path, sent, cookies=cookies).headers
        assert not any(name.startswith("access-control") for name in headers), path


def test_another_page_cannot_use_a_token(one: Gateway) -> None:
    for method, path in CHANGING:
        assert call(one, method, path, ADMIN | {"origin": "https://evil.example.com"}).status_code == 403, path


def test_the_data_port_has_no_route_of_the_admin_port(one: Gateway) -> None:
    own = {*ROUTES, "/", "/docs", "/openapi.json"}
    for method, path in GUARDED:
        if path not in own:
            url = f"{one.url}{PATHS.get(path, path)}"
            response = httpx2.request(method, url, headers=ADMIN, timeout=60)
            assert response.status_code in (401, 404, 405), (method, path, response.text)
            assert response.status_code != 404 or response.json()["error"]["code"] == "not_found"


def raw(one: Gateway, method: str, path: str, **headers: str) -> tuple[int, str]:
    """Send a path as it is, which a client library would change."""
    with closing(HTTPConnection("127.0.0.1", one.admin, timeout=30)) as connection:
        connection.putrequest(method, path)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.mark.parametrize(
    "path",
    ["/livez/../admin/v1/keys", "/livez/%2e%2e/status", "//admin/v1/keys", "/livez;/status", "/livez%00/status", "/LIVEZ/../keys",
     "/sign-in/../status", "/sign-in/callback/../../status", "/readyz?/../status", "/status#/livez", "/%2e/status", "/./keys"],
)  # fmt: skip
def test_another_form_of_a_path_opens_no_route(one: Gateway, path: str) -> None:
    """Paths that begin like a route without authentication."""
    status, text = raw(one, "GET", path)
    assert status in (400, 401, 404) or (path == "/readyz?/../status" and status == 200), (status, text)
    assert "of-ops" not in text and "sim/one" not in text


def test_a_header_does_not_change_the_method_or_the_path(one: Gateway, issuer: OidcIssuer) -> None:
    """Some frameworks accept another method and path in headers, which the check of roles would not see."""
    before = state(one)
    cookies = "; ".join(f"{name}={value}" for name, value in signed_in(one, issuer, one.admin, groups=["viewers"]).items())
    headers = {"x_http_method_override": "DELETE", "x_method_override": "DELETE", "x_original_url": "/admin/v1/keys/of-ops",
               "x_rewrite_url": "/admin/v1/keys/of-ops", "x_forwarded_for": "127.0.0.1", "x_real_ip": "127.0.0.1"}  # fmt: skip
    assert raw(one, "GET", "/admin/v1/keys/of-ops?_method=DELETE", cookie=cookies, **headers)[0] == 200
    assert raw(one, "GET", "/livez", **headers)[0] == 200
    assert raw(one, "GET", "/status", **headers)[0] == 401
    assert state(one) == before


def test_no_request_writes_a_line_of_the_log(one: Gateway) -> None:
    """IDs in paths with a line break and a terminal sequence, which the log repeats."""
    forged = "%0A2020-01-01T00:00:00.000Z%20INFO%20control:%20forged%1B%5B2J"
    for port in (one.data, one.admin):
        response = httpx2.get(f"http://127.0.0.1:{port}/sign-in/callback/x{forged}", timeout=60)
        assert response.status_code in (400, 404), response.text
    assert call(one, "POST", f"/models/x{forged}/stop", ADMIN).status_code == 404
    assert call(one, "POST", f"/servers/x{forged}/cordon", ADMIN).status_code == 404
    wait_for(lambda: "a sign-in at an unknown issuer" in one.output, why=lambda: f"{response.status_code} {response.text} {one.output}")
    assert not any(line.startswith("2020-01-01") for line in one.output.splitlines())
    assert "\x1b" not in one.output


def test_refused_attempts_are_in_the_audit_log(one: Gateway, issuer: OidcIssuer) -> None:
    """The attacker cannot hide behind the number of attempts: what is suppressed is counted."""

    def suppressed() -> float:
        found = re.search(
            r'^vllm_gateway_audit_entries_total{outcome="suppressed"} (\S+)$', call(one, "GET", "/metrics", ADMIN).text, re.MULTILINE
        )
        return 0.0 if found is None else float(found[1])

    cookies, before = signed_in(one, issuer, one.admin, groups=["viewers"], sub="mallory"), suppressed()
    for _ in range(3):
        call(one, "DELETE", "/admin/v1/keys/of-ops", here(one), cookies=cookies)
    lines = [json.loads(line) for line in Path(one.folder / "audit.jsonl").read_text().splitlines()]
    of_mallory = [line for line in lines if line["actor"]["name"] == "one:mallory" and line["action"] == "request.refused"]
    assert len(of_mallory) + suppressed() - before >= 3


def test_every_route_has_a_target_that_exists() -> None:
    assert all("{" not in PATHS.get(path, path) for _, path in PERMISSIONS)
