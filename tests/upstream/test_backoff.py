"""Pauses double up to the longest one, start again after a success, and vary by at most their spread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.backoff import Backoff, doubled


def test_pauses_double_up_to_the_longest_one() -> None:
    assert [doubled(0.5, 5.0, failures) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert doubled(1.0, 60.0, 10**9) == 60.0, "a server may fail for years"


def test_a_success_starts_with_the_first_pause_again() -> None:
    backoff = Backoff(1.0, 8.0, spread=0.0)
    assert [backoff.next_pause() for _ in range(5)] == [1, 2, 4, 8, 8]
    backoff.reset()
    assert [backoff.next_pause() for _ in range(2)] == [1, 2]


@given(st.floats(0.01, 100), st.floats(0.0, 0.9), st.integers(1, 40))
def test_pauses_vary_by_at_most_their_spread(first: float, spread: float, failures: int) -> None:
    backoff = Backoff(first, 50 * first, spread)
    for number in range(1, failures + 1):
        assert backoff.next_pause() == pytest.approx(doubled(first, 50 * first, number), rel=spread + 1e-9)


def test_two_tasks_do_not_return_together() -> None:
    one, two = Backoff(1.0, 60.0), Backoff(1.0, 60.0)
    assert [one.next_pause() for _ in range(5)] != [two.next_pause() for _ in range(5)]
