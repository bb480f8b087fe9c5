"""Authentication and `Host` checks of the admin port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.process import Gateway, configuration, gateway, launched

TOKEN = "an-admin-token"
PATHS = [
    "/metrics",
    "/status",
    "/nothing",
    "/console/nothing",
    "/livez/",
    "/status/",
    "/metrics?x=/livez",
    "//livez",
    "/models/sim%2Fone/stop",
]


def get(one: Gateway, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(f"http://127.0.0.1:{one.admin}{path}", headers=headers, timeout=30, verify=False)


def test_a_token_is_required(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    config = configuration(launched(), admin={"port": 0, "token": {"file": "token"}})
    with gateway(tmp_path, config) as one:
        for path in PATHS:
            for shown in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"},
                          {"authorization": "Bearer"}, {"x-api-key": TOKEN}, {"authorization": "Bearer %00"}):  # fmt: skip
                response = get(one, path, **shown)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer", (path, shown)
                assert "sim/one" not in response.text and "vllm_gateway" not in response.text
        for scheme in ("Bearer", "bearer"):
            assert "vllm_gateway_requests_total" in get(one, "/metrics", authorization=f"{scheme} {TOKEN}").text
        assert get(one, "/status", authorization=f"Bearer {TOKEN}", host="gateway.internal").json()["ready"]
        assert [get(one, path).status_code for path in ("/livez", "/readyz")] == [200, 200]
        assert one.command("status").returncode == 0, "the socket needs none"
        assert TOKEN not in one.output + one.log


def test_a_browser_without_the_token_is_sent_to_the_console(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    with gateway(tmp_path, configuration(launched(), admin={"port": 0, "token": {"file": "token"}})) as guarded:
        for path in ("/status", "/docs", "/nothing"):
            response = get(guarded, path, accept=browser)
            assert (response.status_code, response.headers["location"], response.content) == (303, "/console", b"")
            assert (response.headers["vary"], response.headers["cache-control"]) == ("accept", "no-store")
        page = get(guarded, "/console", accept=browser)
        assert page.status_code == 200 and "server.admin.token" in page.text
        assert "sim/one" not in page.text and TOKEN not in page.text
        assert page.content == get(guarded, "/console", accept=browser, authorization=f"Bearer {TOKEN}").content
        assert get(guarded, "/status", accept="application/json").json() == {"error": "the admin port requires its token"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:9090", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:9090", 200),
        ("10.1.2.3", 200),
        ("evil.example.com", 421),
        ("evil.example.com:9090", 421),
        ("localhost.evil.example.com", 421),
        ("127.0.0.1.evil.example.com", 421),
        ("localhost@evil.example.com", 421),
    ],
)
def test_a_page_of_another_site_cannot_read_the_loopback_port(one: Gateway, host: str, status: int) -> None:
    for path in ("/status", "/metrics"):
        assert get(one, path, host=host).status_code == status
    assert get(one, "/livez", host=host).status_code == 200


def get_twice(one: Gateway, path: str, name: str, *values: str, method: str = "GET") -> tuple[int, str]:
    """Return the status and the error message for a header that is sent more than once."""
    with closing(HTTPConnection("127.0.0.1", one.admin, timeout=10)) as connection:
        connection.putrequest(method, path, skip_host=name == "Host")
        for value in values:
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]


@pytest.mark.parametrize("path", ["/status", "/metrics", "/livez", "/nothing"])
def test_a_second_host_is_refused(one: Gateway, path: str) -> None:
    for hosts in (("evil.example.com", "localhost"), ("localhost", "evil.example.com"), ("localhost", "localhost")):
        assert get_twice(one, path, "Host", *hosts) == (400, "the header host or authorization was sent more than once")


def test_a_second_authorization_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    right, wrong = f"Bearer {TOKEN}", "Bearer wrong"
    with gateway(tmp_path, configuration(launched(), admin={"port": 0, "token": {"file": "token"}})) as guarded:
        for shown in ((wrong, right), (right, wrong), (right, right)):
            for path, method in (("/status", "GET"), ("/reload", "POST")):
                assert get_twice(guarded, path, "Authorization", *shown, method=method)[0] == 400
        assert get(guarded, "/status", authorization=right).status_code == 200


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with gateway(tmp_path_factory.mktemp("guarded"), configuration(launched())) as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "HERE", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "HERE"}, 200),
        ({"origin": "https://gateway.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "HERE", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "HERE", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "null", "sec-fetch-site": "none"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_only_a_page_of_this_port_may_operate_with_a_token(guarded: Gateway, headers: dict[str, str], status: int) -> None:
    here = f"http://127.0.0.1:{guarded.admin}"
    sent = {name: here if value == "HERE" else value for name, value in headers.items()} | {"authorization": f"Bearer {TOKEN}"}
    response = httpx2.post(f"{here}/reload", headers=sent, timeout=30)
    assert response.status_code == status, response.text


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(TOKEN)
    with gateway(folder, configuration(launched(), admin={"port": 0, "token": {"file": "token"}})) as one:
        yield one


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", 303),
        ("*/*", 200),
        ("application/json, text/html;q=0.5", 200),
        ("text/html;q=0", 200),
        ("text/html;q=nonsense", 200),
        ("", 200),
    ],
)
def test_a_browser_at_the_status_is_sent_to_the_console(guarded: Gateway, accept: str, status: int) -> None:
    response = get(guarded, "/status", accept=accept, authorization=f"Bearer {TOKEN}")
    assert (response.status_code, response.headers["vary"]) == (status, "accept")
    assert response.headers.get("location", "console") == "console"
