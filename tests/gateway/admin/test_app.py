"""The admin port: servers' own metrics, where Prometheus finds them, and the description of it all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from starlette.routing import Route

from gateway.admin.app import application
from gateway.admin.openapi import ROUTES, document, page
from gateway.fleet.operations import OPERATIONS
from tests.support.chromium import chromium
from tests.support.http_server import threaded
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

LAUNCHED = "sim/one#0"


def one_hash(digit: str, **more: str) -> dict[str, str]:
    return {"hash": "sha256:" + digit * 64, **more}


ENDING: list[dict[str, Any]] = [
    {"id": "short", **one_hash("1", expires="2030-01-01")},
    {"id": "rotated", "hash": [one_hash("2", expires="2032-01-01"), one_hash("3", expires="2034-01-01")]},
    {"id": "both", "hash": one_hash("4", expires="2032-01-01"), "expires": "2030-01-01"},
    {"id": "goes-on", "hash": [one_hash("5", expires="2032-01-01"), one_hash("6")]},
    {"id": "gone", "hash": one_hash("7", expires="2032-01-01"), "expires": "2033-01-01", "revoked": True},
]


class Found(BaseHTTPRequestHandler):
    """A server that runs already; its metrics are a line, or an error."""

    broken = False

    def do_GET(self) -> None:
        failing = self.path == "/metrics" and self.server.broken  # type: ignore[attr-defined]
        body = b"vllm:found 1\n" if self.path == "/metrics" else b'{"data": []}'
        self.send_response(500 if failing else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def found() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Found)
    server.broken = False  # type: ignore[attr-defined]
    with threaded(server):
        yield server


@pytest.fixture(scope="module")
def other() -> Iterator[ThreadingHTTPServer]:
    with found() as server:
        yield server


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, other: ThreadingHTTPServer) -> Iterator[Gateway]:
    found_one = {"id": "found", "servers": [{"url": f"http://127.0.0.1:{other.server_port}"}]}
    config = configuration(launched(), found_one, launched("sim/late", **{"sim-healthy-after": 600}))
    config["keys"] += ENDING
    with gateway(tmp_path_factory.mktemp("gateway"), config, ready=False) as one:
        wait_for(lambda: len(one.get("/metrics/targets").json()) == 2)
        yield one


def test_a_launched_servers_metrics_are_to_be_had(running: Gateway) -> None:
    running.ask()
    for name in (quote(LAUNCHED, safe=""), quote(LAUNCHED)):
        answer = running.get(f"/metrics/servers/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; version=0.0.4"
        assert "vllm:num_requests_running{" in answer.text


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text;version=next", "text/plain; version=0.0.4"),
    ],
)
def test_the_gateways_own_metrics_come_in_the_form_that_is_asked_for(running: Gateway, accept: str, form: str) -> None:
    answer = httpx2.get(f"http://127.0.0.1:{running.admin}/metrics", headers={"accept": accept}, timeout=30, verify=False)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(form)
    assert "vllm_gateway_build_info{" in answer.text


def test_a_found_servers_metrics_are_to_be_had_and_its_failure_is_told(running: Gateway, other: ThreadingHTTPServer) -> None:
    name = f"http://127.0.0.1:{other.server_port}"
    for written in (quote(name, safe=""), name):
        assert running.get(f"/metrics/servers/{written}").text == "vllm:found 1\n"
    other.broken = True  # type: ignore[attr-defined]
    try:
        answer = running.get(f"/metrics/servers/{quote(name, safe='')}")
        assert (answer.status_code, answer.text) == (502, f"{name}: GET /metrics: status 500\n")
    finally:
        other.broken = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "sim/one", "sim/late%230", "http%3A%2F%2F127.0.0.1%3A1", "..%2F..%2Fetc%2Fpasswd", "sim/one%230%2F"])
def test_nothing_else_can_be_asked(running: Gateway, name: str) -> None:
    assert running.get(f"/metrics/servers/{name}").status_code == 404


def test_prometheus_is_told_where_they_are(running: Gateway, other: ThreadingHTTPServer) -> None:
    answer = running.get("/metrics/targets")
    url = f"http://127.0.0.1:{other.server_port}"
    assert answer.headers["content-type"] == "application/json"
    assert {(*group["targets"], *group["labels"].items()) for group in answer.json()} == {
        (f"127.0.0.1:{running.admin}", ("__metrics_path__", f"/metrics/servers/{name}"), ("model", model), ("server", name))
        for name, model in ((LAUNCHED, "sim/one"), (url, "found"))
    }


def test_when_a_key_expires_is_shown(running: Gateway) -> None:
    """That of its last good hash; nothing of those that have no end, or were revoked."""
    name = "vllm_gateway_key_expires_timestamp_seconds"
    shown = dict(re.findall(rf'^{name}{{key="([^"]+)"}} (\S+)$', running.get("/metrics").text, re.MULTILINE))
    assert {key: datetime.fromtimestamp(float(value), UTC).year for key, value in shown.items()} == {
        "short": 2030, "rotated": 2034, "both": 2030,
    }  # fmt: skip


# The description


class Nothing:
    """Shows and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return dict


def served(app: Any) -> set[tuple[str, str]]:
    return {(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or () if method != "HEAD"}


def test_what_is_served_is_described_and_what_is_described_is_served() -> None:
    nothing: Any = Nothing()
    assert served(application(nothing, nothing)) == {(route.method, route.path) for route in ROUTES}


def test_the_document_is_openapi(running: Gateway) -> None:
    told = running.get("/openapi.json").json()
    assert told == document() and told["openapi"].startswith("3.1.")
    for path, methods in told["paths"].items():
        for operation in methods.values():
            named = {each["name"] for each in operation["parameters"] if each["required"] and each["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path))
            assert operation["summary"] and all(answer["description"] for answer in operation["responses"].values())
    acts = told["paths"]["/models/{id}/{operation}"]["post"]
    assert acts["security"] == [{"token": []}] and {"401", "403"} <= set(acts["responses"])
    assert told["paths"]["/status"]["get"]["security"] == [{}, {"token": []}] and "security" not in told["paths"]["/livez"]["get"]
    assert acts["parameters"][1]["schema"]["enum"] == list(OPERATIONS)


@pytest.mark.parametrize("path", [route.path for route in ROUTES if "{" not in route.path and not route.is_operation])
def test_a_described_route_answers_as_it_says(running: Gateway, path: str) -> None:
    answer = running.get(path)
    (described,) = (route for route in ROUTES if route.path == path)
    assert answer.status_code in described.responses
    assert answer.status_code != 200 or any(answer.headers["content-type"].startswith(kind) for kind in described.kinds)


def test_the_page_says_the_same_and_needs_nothing_else(running: Gateway, tmp_path: Path) -> None:
    answer = running.get("/docs")
    assert answer.text == page()[0] and "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"(src|href)=", answer.text)
    with chromium(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{running.admin}/docs")
        wait_for(lambda: "admin API" in browser.text() and browser.evaluate("document.readyState") == "complete")
        assert all(f"{route.method} {route.template}" in browser.text() for route in ROUTES)
        assert browser.evaluate("getComputedStyle(document.querySelector('dl')).display") == "grid"
        assert browser.complaints == []
