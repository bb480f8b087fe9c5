"""The page of the configuration: what is in use, what a file would change, and a reload; secrets are on no page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import MARKUP, Console, check_quiet, console, written
from tests.support.process import configuration, launched, wait_for

SECRET = "a-secret-that-no-page-shows"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    config = configuration(launched())
    config["models"][0]["launch"]["env"] = {"SOME_TOKEN": SECRET}
    with console(tmp_path_factory, config) as one:
        yield one


@pytest.fixture(autouse=True)
def as_before(seen: Console) -> Iterator[None]:
    file = seen.gateway.folder / "gateway.yaml"
    before = file.read_text()
    seen.browser.complaints.clear()
    yield
    assert SECRET not in seen.browser.evaluate("document.documentElement.outerHTML")
    check_quiet(seen)
    file.write_text(before)
    wait_for(lambda: preview(seen)["problems"] == preview(seen)["needs_restart"] == [] and preview(seen)["last"]["successful"])


def preview(seen: Console, role: str = "operator") -> dict[str, Any]:
    found: dict[str, Any] = seen.call("GET", "/admin/v1/configuration", role).json()
    return found


def file_of(seen: Console) -> Path:
    return seen.gateway.folder / "gateway.yaml"


def test_what_is_in_use_and_since_when(seen: Console) -> None:
    seen.open("/console/configuration")
    seen.wait_for_text("The file is valid, and all of it is in use.")
    assert str(file_of(seen)) in seen.browser.text()
    seen.fits()


def test_the_problems_of_a_rejected_file_have_their_lines(seen: Console) -> None:
    written(file_of(seen), ("id: sim/one", f'"{MARKUP}": 1\n  id: sim/one'))
    line = next(number for number, text in enumerate(file_of(seen).read_text().splitlines(), 1) if "owned" in text)
    seen.open("/console/configuration")
    seen.wait_for_text("so it is rejected. The previous configuration stays in use.")
    seen.wait_for_text(f"{file_of(seen)}:{line}")
    assert MARKUP in seen.browser.text()
    seen.wait_for_text("Rejected")


def test_a_setting_that_needs_a_restart_with_both_values(seen: Console) -> None:
    written(file_of(seen), ("server:\n", "server:\n  workers: 3\n"))
    seen.open("/console/configuration", "operator")
    seen.wait_for_text("The file is in use, except for 1 setting that needs a restart.")
    seen.wait_for_text("server.workers needs a restart (3 in the file, 1 in use)")
    assert "server.workers" in seen.browser.evaluate("document.querySelector('#values table').innerText")
    assert "values" not in preview(seen, "viewer")


def test_a_reload_is_confirmed_and_recorded_with_its_requester(seen: Console) -> None:
    seen.open("/console/configuration", "operator")
    seen.click("#reload")
    seen.wait("document.querySelector('dialog')?.open")
    seen.wait_for_text("The file is the same as the configuration in use, so nothing would change.")
    seen.click("dialog form button.primary")
    seen.wait_for_text("Nothing has changed.")
    seen.wait_for_text("The token an-operator, from 127.0.0.1")


def test_a_viewer_may_not_reload(seen: Console) -> None:
    seen.open("/console/configuration", "viewer")
    seen.wait_for_text("all of it is in use")
    assert seen.buttons() == ["Check the file again"]
