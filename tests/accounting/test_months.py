"""A closed month and the open rows have what an engine has counted and the reconciliation does not explain otherwise."""

from __future__ import annotations

import pytest

from tests.accounting.months import MonthResult, MonthSum


@pytest.mark.parametrize(("opened", "difference"), [(40, 0), (41, 1), (39, -1)])
def test_the_difference_is_what_nothing_explains(opened: int, difference: int) -> None:
    one = MonthSum("m", "prompt", closed=60, opened=opened, engine=105, unbilled=7, unsampled=2)
    result = MonthResult(closed=6, opened=4, replaced=3, sums=[one])
    assert one.difference == difference and bool(result.problems()) == (difference != 0)
    assert list(result.lines())[-1] == f"| m#0 | prompt | 60 | {opened} | 105 | 7 | 2 | {difference} |"
