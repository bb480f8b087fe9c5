"""Hooks and fixtures of the whole suite."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.compiled.contract import install
from tests.support.distribution import DURATIONS, Stopwatch, group_of, problems
from tests.support.distribution import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler  # the hook is found by its name here
from tests.support.shared import Shared

# An example, and the making of it, take as long as a busy machine lets them.
EVERY_PROFILE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("change", max_examples=20, **EVERY_PROFILE)
settings.register_profile("deep", max_examples=200, **EVERY_PROFILE)
settings.register_profile("mutants", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate), **EVERY_PROFILE)
settings.load_profile("deep" if os.environ.get("DEEP") else "change")

_MEASURED = pytest.StashKey[dict[str, list[str]]]()
_SHARED = pytest.StashKey[Shared]()


def pytest_configure(config: pytest.Config) -> None:
    """Check the types of attributes. Prepare for the figures of tests and, where WRITE_DURATIONS is set, for durations."""
    config.stash[_MEASURED] = {}
    config.stash[_SHARED] = Shared()
    install()
    if os.environ.get("WRITE_DURATIONS") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch(DURATIONS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select rows of the matrix of faults by their numbers, where FAULTS_ROWS is set.

    Raises:
        pytest.UsageError: an item needs a real vLLM, and the scheduler could not know.
    """
    if wrong := problems(item.nodeid for item in items if item.get_closest_marker("vllm") is not None):
        raise pytest.UsageError(f"A test with a real vLLM is in tests/vllm, or a parameter of it has an id @SERVER: {wrong}")
    if wanted := os.environ.get("FAULTS_ROWS", "").split():
        others = [item for item in items if (mark := item.get_closest_marker("row")) is None or str(mark.args[0]) not in wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Shared:
    """The shared state of a group of tests."""
    return request.config.stash[_SHARED]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what the tests of a group share after the last of them."""
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        item.config.stash[_SHARED].close()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Leave a figure for the report of the matrix of faults, e.g. ``measured("1,000 of 1,000 streams ended within 0.8 s")``."""
    mark = request.node.get_closest_marker("row")
    assert mark is not None, "a measured test belongs to a row"

    def note(text: str) -> None:
        request.config.stash[_MEASURED].setdefault(str(mark.args[0]), []).append(text)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the reasons of skips, each once with its number of tests. Skips are failures if NOTHING_SKIPPED is set."""
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason}")
    if os.environ.get("NOTHING_SKIPPED") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("NOTHING_SKIPPED is set, and something was skipped", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip fails such a run; figures are left where FAULTS_REPORT says."""
    if path := os.environ.get("FAULTS_REPORT"):
        Path(path).write_text(json.dumps(session.config.stash[_MEASURED], indent=1, sort_keys=True) + "\n")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("NOTHING_SKIPPED") and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
