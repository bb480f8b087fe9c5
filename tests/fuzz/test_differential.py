"""Each target compares a fixed number of cases in the suite. ``make fuzz`` and ``make fuzz-full`` run more."""

from __future__ import annotations

import pytest

from tests.fuzz import report
from tests.fuzz.differential.__main__ import described
from tests.fuzz.differential.registry import TARGETS
from tests.fuzz.differential.run import Plan, run

SEED = 1
PARTS = 10
"""The parts of a target in the suite. The first is small enough to be run for each mutant."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_finds_no_difference(target: str, part: int) -> None:
    result = run(Plan(target, SEED, part, PARTS, TARGETS[target].quick_cases // PARTS, None))
    assert not result.differences, described(target, SEED, result)


def test_the_report_has_the_stored_figures() -> None:
    assert report.PAGE.read_text() == report.rendered(report.stored())
