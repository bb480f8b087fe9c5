"""What holds for the whole suite."""

from __future__ import annotations

import os

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where nothing may be skipped (NOTHING_SKIPPED is set), a skip is told as what it is."""
    if os.environ.get("NOTHING_SKIPPED") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("NOTHING_SKIPPED is set, and something was skipped", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip fails such a run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("NOTHING_SKIPPED") and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
