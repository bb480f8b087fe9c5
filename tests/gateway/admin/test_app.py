"""The admin port: the metrics of each server, the targets for Prometheus, and the OpenAPI document."""

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

from gateway.access.actor import Actor, Role
from gateway.access.permissions import is_permitted
from gateway.admin.app import application
from gateway.admin.openapi import ROUTES, document, page
from gateway.audit.entry import NoAudit
from gateway.fleet.operations import OPERATIONS
from tests.support.chromium import chromium
from tests.support.console import responded
from tests.support.http_server import threaded
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

LAUNCHED = "sim/one#0"


def one_hash(digit: str, **more: str) -> dict[str, str]:
    return {"hash": "sha256:" + digit * 64, **more}


EXPIRING: list[dict[str, Any]] = [
    {"id": "short", **one_hash("1", expires="2030-01-01")},
    {"id": "rotated", "hash": [one_hash("2", expires="2032-01-01"), one_hash("3", expires="2034-01-01")]},
    {"id": "both", "hash": one_hash("4", expires="2032-01-01"), "expires": "2030-01-01"},
    {"id": "goes-on", "hash": [one_hash("5", expires="2032-01-01"), one_hash("6")]},
    {"id": "gone", "hash": one_hash("7", expires="2032-01-01"), "expires": "2033-01-01", "revoked": True},
]


class ExistingServer(BaseHTTPRequestHandler):
    """A server that the gateway does not launch. Its metrics are one line or an error."""

    broken = False

    def do_GET(self) -> None:
        failing = self.path == "/metrics" and self.server.broken  # type: ignore[attr-defined]
        body = b"vllm:found 1\n" if self.path == "/metrics" else b'{"data": []}'
        self.send_response(500 if failing else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def found() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ExistingServer)
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
    config["keys"] += EXPIRING
    with gateway(tmp_path_factory.mktemp("gateway"), config, ready=False) as one:
        wait_for(lambda: len(one.get("/metrics/targets").json()) == 2)
        yield one


def test_the_metrics_of_a_launched_server(running: Gateway) -> None:
    running.request()
    for name in (quote(LAUNCHED, safe=""), quote(LAUNCHED)):
        response = running.get(f"/metrics/servers/{name}")
        assert response.status_code == 200 and response.headers["content-type"] == "text/plain; version=0.0.4"
        assert "vllm:num_requests_running{" in response.text


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text;version=next", "text/plain; version=0.0.4"),
    ],
)
def test_the_gateways_metrics_have_the_format_that_accept_requests(running: Gateway, accept: str, form: str) -> None:
    response = httpx2.get(f"http://127.0.0.1:{running.admin}/metrics", headers={"accept": accept}, timeout=30, verify=False)
    assert response.status_code == 200 and response.headers["content-type"].startswith(form)
    assert "vllm_gateway_build_info{" in response.text


def test_the_metrics_and_the_failure_of_a_server_that_runs_elsewhere(running: Gateway, other: ThreadingHTTPServer) -> None:
    name = f"http://127.0.0.1:{other.server_port}"
    for written in (quote(name, safe=""), name):
        assert running.get(f"/metrics/servers/{written}").text == "vllm:found 1\n"
    other.broken = True  # type: ignore[attr-defined]
    try:
        response = running.get(f"/metrics/servers/{quote(name, safe='')}")
        assert (response.status_code, response.text) == (502, f"{name}: GET /metrics: status 500\n")
    finally:
        other.broken = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "sim/one", "sim/late%230", "http%3A%2F%2F127.0.0.1%3A1", "..%2F..%2Fetc%2Fpasswd", "sim/one%230%2F"])
def test_other_names_are_not_found(running: Gateway, name: str) -> None:
    assert running.get(f"/metrics/servers/{name}").status_code == 404


def test_the_targets_for_prometheus(running: Gateway, other: ThreadingHTTPServer) -> None:
    response = running.get("/metrics/targets")
    url = f"http://127.0.0.1:{other.server_port}"
    assert response.headers["content-type"] == "application/json"
    assert {(*group["targets"], *group["labels"].items()) for group in response.json()} == {
        (f"127.0.0.1:{running.admin}", ("__metrics_path__", f"/metrics/servers/{name}"), ("model", model), ("server", name))
        for name, model in ((LAUNCHED, "sim/one"), (url, "found"))
    }


def test_the_expiry_of_a_key_is_a_metric(running: Gateway) -> None:
    """The metric has the expiry of the last valid hash. A key without an expiry and a revoked key have no metric."""
    name = "vllm_gateway_key_expires_timestamp_seconds"
    shown = dict(re.findall(rf'^{name}{{key="([^"]+)"}} (\S+)$', running.get("/metrics").text, re.MULTILINE))
    assert {key: datetime.fromtimestamp(float(value), UTC).year for key, value in shown.items()} == {
        "short": 2030, "rotated": 2034, "both": 2030,
    }  # fmt: skip


# The OpenAPI document


class Nothing:
    """Shows and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return dict


def served(app: Any) -> set[tuple[str, str]]:
    return {(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or () if method != "HEAD"}


def test_every_served_route_is_described_and_every_described_route_is_served() -> None:
    nothing: Any = Nothing()
    assert served(application(nothing, nothing, NoAudit(), raises=nothing, live=nothing, files=nothing)) == {
        (route.method, route.path) for route in ROUTES
    }


def test_the_document_is_openapi(running: Gateway) -> None:
    served_document = running.get("/openapi.json").json()
    assert served_document == document() and served_document["openapi"].startswith("3.1.")
    for path, methods in served_document["paths"].items():
        for operation in methods.values():
            named = {each["name"] for each in operation["parameters"] if each["required"] and each["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path))
            assert operation["summary"] and all(response["description"] for response in operation["responses"].values())
    acts = served_document["paths"]["/models/{id}/{operation}"]["post"]
    assert acts["security"] == [{"token": ["operator"]}] and {"401", "403"} <= set(acts["responses"])
    assert (
        served_document["paths"]["/status"]["get"]["security"] == [{}, {"token": ["viewer"]}]
        and "security" not in served_document["paths"]["/livez"]["get"]
    )
    assert acts["parameters"][1]["schema"]["enum"] == list(OPERATIONS)


@pytest.mark.parametrize("path", [route.path for route in ROUTES if "{" not in route.path and not route.is_operation])
def test_a_described_route_responds_as_described(running: Gateway, path: str) -> None:
    response = responded("GET", f"http://127.0.0.1:{running.admin}{path}")
    (described,) = (route for route in ROUTES if route.path == path and not route.is_operation)
    without_token = Actor("loopback", "", Role.VIEWER)
    assert response.status_code in (described.responses if is_permitted(without_token, described.permission) else {403})
    assert response.status_code != 200 or any(response.headers["content-type"].startswith(kind) for kind in described.kinds)


def test_the_page_shows_every_route_and_loads_nothing_else(running: Gateway, tmp_path: Path) -> None:
    response = running.get("/docs")
    assert response.content == page().body and "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=", response.text)
    with chromium(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{running.admin}/docs")
        wait_for(lambda: "admin API" in browser.text() and browser.evaluate("document.readyState") == "complete")
        assert all(f"{route.method} {route.template}" in browser.text() for route in ROUTES)
        assert browser.evaluate("getComputedStyle(document.querySelector('dl')).display") == "grid"
        assert browser.complaints == []
