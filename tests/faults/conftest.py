"""The matrix of faults: each test says by its mark which row it provokes, and may leave what it measured for the report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FULL = bool(os.environ.get("FAULTS_FULL"))
"""The whole size (``make faults``): thousands of sockets; otherwise one that an ordinary run can bear."""
_MEASURED = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(number): the row of the matrix of faults that a test provokes")
    config.stash[_MEASURED] = {}


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Leave a figure for the report, e.g. ``measured("1,000 of 1,000 streams ended within 0.8 s")``."""
    mark = request.node.get_closest_marker("row")
    assert mark is not None, "a measured test belongs to a row"

    def note(text: str) -> None:
        request.config.stash[_MEASURED].setdefault(str(mark.args[0]), []).append(text)

    return note


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the figures where FAULTS_REPORT says."""
    place = os.environ.get("FAULTS_REPORT")
    if place:
        Path(place).write_text(json.dumps(session.config.stash[_MEASURED], indent=1, sort_keys=True) + "\n")
