"""What holds for the whole suite."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# An example, and the making of it, take as long as a busy machine lets them.
settings.register_profile("suite", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_MEASURED = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Tests may leave figures."""
    config.stash[_MEASURED] = {}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file stay together where several processes share the work; those of the real vLLM are for one of them.

    Of the matrix of faults FAULTS_ROWS can choose rows by their numbers.
    """
    if wanted := os.environ.get("FAULTS_ROWS", "").split():
        others = [item for item in items if (mark := item.get_closest_marker("row")) is None or str(mark.args[0]) not in wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    for item in items:
        real = item.get_closest_marker("vllm") is not None
        item.add_marker(pytest.mark.xdist_group("vllm" if real else item.path.name))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Leave a figure for the report of the matrix of faults, e.g. ``measured("1,000 of 1,000 streams ended within 0.8 s")``."""
    mark = request.node.get_closest_marker("row")
    assert mark is not None, "a measured test belongs to a row"

    def note(text: str) -> None:
        request.config.stash[_MEASURED].setdefault(str(mark.args[0]), []).append(text)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where nothing may be skipped (NOTHING_SKIPPED is set), a skip is told as what it is."""
    if os.environ.get("NOTHING_SKIPPED") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("NOTHING_SKIPPED is set, and something was skipped", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip fails such a run; figures are left where FAULTS_REPORT says."""
    if place := os.environ.get("FAULTS_REPORT"):
        Path(place).write_text(json.dumps(session.config.stash[_MEASURED], indent=1, sort_keys=True) + "\n")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("NOTHING_SKIPPED") and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
