"""The page of the system: workers, dependencies, notices, the API, and the drain, which ends the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway import __version__
from tests.support.console import Console, check_quiet, console
from tests.support.process import configuration, launched


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("data")
    config: dict[str, Any] = configuration(launched(), workers=2) | {"ledger": f"sqlite:///{folder / 'usage.db'}"}
    config["notices"] = [{"name": "ops", "webhook": "http://127.0.0.1:9/hook"}]
    with console(tmp_path_factory, config) as one:
        yield one


@pytest.fixture(autouse=True)
def no_complaint(seen: Console) -> Iterator[None]:
    seen.browser.complaints.clear()
    yield
    check_quiet(seen, "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "ERR_CONNECTION_RESET", "ERR_EMPTY")


def test_workers_dependencies_and_the_version(seen: Console) -> None:
    seen.open("/console/system")
    seen.wait("document.querySelectorAll('#workers tbody tr').length === 2")
    seen.wait_for_text("Database of the ledger")
    seen.wait("/MiB/.test(document.getElementById('workers').innerText)")
    assert f"vllm-gateway {__version__}" in seen.browser.text() and "Apache-2.0" in seen.browser.text()
    seen.fits()


def test_the_admin_api_without_another_tab(seen: Console) -> None:
    seen.open("/console/system", "viewer")
    seen.wait_for_text("Admin API")
    seen.browser.evaluate("document.getElementById('api').open = true")
    seen.wait_for_text("POST /drain")
    rows = seen.browser.evaluate("[...document.querySelectorAll('#routes tbody tr')].map((row) => row.innerText)")
    assert any("GET /admin/v1/overview/changes" in row and "admin" in row for row in rows)


def test_a_viewer_has_no_buttons(seen: Console) -> None:
    seen.open("/console/system", "viewer")
    seen.wait_for_text("No notice was sent yet.")
    assert seen.buttons() == []


def test_a_test_notice_with_what_came_of_it(seen: Console) -> None:
    seen.open("/console/system", "operator")
    seen.click("#test")
    seen.click("dialog form button.primary")
    seen.wait_for_text("Refused ops:")


def test_a_drain_names_the_open_requests_and_ends_the_gateway(seen: Console) -> None:
    seen.open("/console/system", "operator")
    seen.click("#drain")
    seen.wait_for_text("0 open requests may finish within the time of server.drain")
    seen.click("dialog form button.danger")
    seen.wait_for_text("The gateway drains.")
    assert seen.gateway.process.wait(60) == 0
    seen.wait_for_text("The gateway does not respond. This page tries again by itself.")
