"""Who may look at the admin port."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.process import Gateway, configuration, gateway, launched

TOKEN = "an-admin-token"
PATHS = ["/metrics", "/status", "/", "/nothing", "/livez/", "/status/", "/metrics?x=/livez", "//livez", "/models/sim%2Fone/stop"]


def asked(one: Gateway, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(f"http://127.0.0.1:{one.admin}{path}", headers=headers, timeout=30, verify=False)


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    config = configuration(launched(), admin={"port": 0, "token": {"file": "token"}})
    with gateway(tmp_path, config) as one:
        for path in PATHS:
            for shown in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}, {"authorization": f"Basic {TOKEN}"},
                          {"authorization": "Bearer"}, {"x-api-key": TOKEN}, {"authorization": "Bearer %00"}):  # fmt: skip
                answer = asked(one, path, **shown)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", (path, shown)
                assert "sim/one" not in answer.text and "vllm_gateway" not in answer.text
        for scheme in ("Bearer", "bearer"):
            assert "vllm_gateway_requests_total" in asked(one, "/metrics", authorization=f"{scheme} {TOKEN}").text
        assert asked(one, "/status", authorization=f"Bearer {TOKEN}", host="gateway.internal").json()["ready"]
        assert [asked(one, path).status_code for path in ("/livez", "/readyz")] == [200, 200]
        assert one.command("status").returncode == 0, "the socket needs none"
        assert TOKEN not in one.said + one.log


def test_a_browser_without_the_token_gets_a_page_that_says_how_to_authenticate(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    with gateway(tmp_path, configuration(launched(), admin={"port": 0, "token": {"file": "token"}})) as guarded:
        for path in ("/status", "/docs", "/nothing"):
            answer = asked(guarded, path, accept=browser)
            assert (answer.status_code, answer.headers["content-type"]) == (401, "text/html; charset=utf-8")
            assert (answer.headers["www-authenticate"], answer.headers["vary"]) == ("Bearer", "accept")
            assert "server.admin.token" in answer.text and "--token-file" in answer.text
            assert "sim/one" not in answer.text and TOKEN not in answer.text
        page = asked(guarded, "/status", accept=browser, authorization=f"Bearer {TOKEN}")
        assert page.status_code == 200 and "sim/one" in page.text
        assert answer.headers["content-security-policy"] == page.headers["content-security-policy"]
        assert asked(guarded, "/status", accept="application/json").json() == {"error": "the admin port requires its token"}


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
def test_no_other_sites_page_reads_the_loopback_port(one: Gateway, host: str, status: int) -> None:
    for path in ("/status", "/metrics"):
        assert asked(one, path, host=host).status_code == status
    assert asked(one, "/livez", host=host).status_code == 200


def twice(one: Gateway, path: str, name: str, *values: str, method: str = "GET") -> tuple[int, str]:
    """The status and the words for a header that comes more than once."""
    with closing(HTTPConnection("127.0.0.1", one.admin, timeout=10)) as connection:
        connection.putrequest(method, path, skip_host=name == "Host")
        for value in values:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]


@pytest.mark.parametrize("path", ["/status", "/metrics", "/livez", "/nothing"])
def test_a_second_host_is_refused(one: Gateway, path: str) -> None:
    for hosts in (("evil.example.com", "localhost"), ("localhost", "evil.example.com"), ("localhost", "localhost")):
        assert twice(one, path, "Host", *hosts) == (400, "the header host or authorization was sent more than once")


def test_a_second_authorization_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    right, wrong = f"Bearer {TOKEN}", "Bearer wrong"
    with gateway(tmp_path, configuration(launched(), admin={"port": 0, "token": {"file": "token"}})) as guarded:
        for shown in ((wrong, right), (right, wrong), (right, right)):
            for path, method in (("/status", "GET"), ("/reload", "POST")):
                assert twice(guarded, path, "Authorization", *shown, method=method)[0] == 400
        assert asked(guarded, "/status", authorization=right).status_code == 200


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with gateway(tmp_path_factory.mktemp("guarded"), configuration(launched())) as running:
        yield running
