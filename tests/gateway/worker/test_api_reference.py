"""The API reference on the data port: public if the operator enables it, and absent otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gateway.api.reference import document, page
from tests.support.chromium import chromium
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import model, serving
from tests.support.wire import request, request_once


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("manual"), configuration(launched(), docs=True)) as one:
        yield one


def send_request(one: Gateway, path: str, method: str = "GET") -> httpx2.Response:
    return httpx2.request(method, one.url + path, timeout=30, verify=False)


def test_the_document_needs_no_key(running: Gateway) -> None:
    response = send_request(running, "/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json() == document() and response.headers["x-request-id"].startswith("req_")


def test_other_methods_are_refused(running: Gateway) -> None:
    response = send_request(running, "/docs", "POST")
    assert (response.status_code, response.headers["allow"]) == (405, "GET")


def test_a_browser_shows_the_page(running: Gateway, tmp_path: Path) -> None:
    response = send_request(running, "/docs")
    assert response.content == page(document()).body and "default-src 'none'" in response.headers["content-security-policy"]
    with chromium(tmp_path) as browser:
        browser.open(running.url + "/docs")
        wait_for(lambda: "POST /v1/chat/completions" in browser.text())
        assert browser.evaluate("getComputedStyle(document.querySelector('dl')).display") == "grid"
        assert browser.complaints == []


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_the_reference_is_absent_by_default(path: str) -> None:
    async with serving([model(1)]) as served:
        reply = await request_once(served.port, request(b"", path, method="GET", token=None))
        assert reply.status == 404


@pytest.mark.parametrize("path", ["/docs/", "/docs/x", "/openapi.json/", "/openapi.yaml"])
async def test_no_other_path_is_served(path: str) -> None:
    async with serving([model(1)], docs=True) as served:
        reply = await request_once(served.port, request(b"", path, method="GET", token=None))
        assert reply.status == 404
