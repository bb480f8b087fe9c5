"""The errors that eject a server, the length of an ejection, and its end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.balancing.ejection import FIRST_PAUSE, LONGEST_PAUSE, THRESHOLD, WEIGHTS, EjectionState, weight
from upstream.balancing.retry_budget import LARGEST, MINIMUM, SHARE, RetryBudget
from upstream.http import errors
from upstream.http.errors import (
    ConnectFailed,
    ConnectTimeout,
    Disconnected,
    EngineDead,
    LocalLimit,
    Preempted,
    ServerError,
    StaleConnection,
    TotalTimeout,
    UpstreamError,
)

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UpstreamError) and kind is not UpstreamError]


def an(kind: type[UpstreamError]) -> UpstreamError:
    return kind("s", "words")


def test_every_error_is_in_the_table() -> None:
    assert all(any(base in WEIGHTS for base in kind.__mro__) for kind in KINDS)
    assert len({kind.reason for kind in KINDS}) == len(KINDS), "each has a reason of its own"


@pytest.mark.parametrize("kind", [LocalLimit, Preempted, StaleConnection, ServerError, TotalTimeout])
def test_what_is_no_fault_of_the_servers_never_counts(kind: type[UpstreamError]) -> None:
    state = EjectionState()
    assert not any(state.record_failure(an(kind), float(now)) for now in range(100))
    assert not state.has_failures


@pytest.mark.parametrize("kind", [ConnectFailed, ConnectTimeout])
def test_a_refused_connection_ejects_immediately(kind: type[UpstreamError]) -> None:
    assert EjectionState().record_failure(an(kind), 5.0)


def test_others_must_come_together_with_no_success_between() -> None:
    state = EjectionState()
    for _ in range(3):
        assert [state.record_failure(an(Disconnected), 1.0) for _ in range(THRESHOLD - 1)] == [False] * (THRESHOLD - 1)
        assert state.has_failures
        state.reset()
    assert [state.record_failure(an(EngineDead), 1.0) for _ in range(THRESHOLD)] == [False] * (THRESHOLD - 1) + [True]


def test_each_pause_is_twice_the_one_before_until_a_success() -> None:
    state, now, pauses = EjectionState(), 10.0, []
    for _ in range(8):
        assert state.record_failure(an(ConnectFailed), now)
        pauses.append(state.ejected_until - now)
        assert not state.expire(state.ejected_until - 0.01)
        now = state.ejected_until
        assert state.expire(now) and not state.expire(now), "told once"
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30] and (FIRST_PAUSE, LONGEST_PAUSE) == (1, 30)
    state.reset()
    assert state.record_failure(an(ConnectFailed), now) and state.ejected_until - now == FIRST_PAUSE


def test_a_crowd_that_dies_together_is_one_failure() -> None:
    state = EjectionState()
    ejections = [state.record_failure(an(Disconnected), 1.0) for _ in range(1000)]
    assert ejections.count(True) == 1 and state.ejected_until == 1.0 + FIRST_PAUSE


def test_one_failure_ejects_a_server_again_after_its_ejection() -> None:
    state = EjectionState()
    state.record_failure(an(ConnectFailed), 0.0)
    assert state.expire(FIRST_PAUSE)
    assert state.record_failure(an(Disconnected), FIRST_PAUSE)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0, 50)), max_size=60))
def test_nothing_makes_a_pause_longer_than_the_longest(events: list[tuple[type[UpstreamError], float]]) -> None:
    state, now = EjectionState(), 0.0
    for kind, later in events:
        now += later
        state.record_failure(an(kind), now)
        assert state.ejected_until <= now + LONGEST_PAUSE
        state.expire(now)
    assert weight(an(UpstreamError)) == 0


# The budget


def test_a_single_failure_without_traffic_may_be_tried_again() -> None:
    assert RetryBudget().try_spend(1, 1000.0)


def test_without_traffic_only_the_floor_is_there_and_it_comes_back() -> None:
    budget = RetryBudget()
    assert sum(budget.try_spend(0, 1000.0) for _ in range(100)) == MINIMUM
    assert not budget.try_spend(0, 1000.5)
    assert budget.try_spend(0, 1001.5) and not budget.try_spend(0, 1001.6)
    assert sum(budget.try_spend(0, 2000.0) for _ in range(100)) == MINIMUM


@given(st.integers(100, 5000), st.integers(1, 50))
def test_no_more_than_a_share_of_the_traffic(requests: int, per_retry: int) -> None:
    """All of it within one moment, each ``per_retry``-th request wanting a retry."""
    budget = RetryBudget()
    granted = sum(budget.try_spend(number, 1000.0) for number in range(1, requests + 1) if number % per_retry == 0)
    assert granted <= MINIMUM + SHARE * requests
    if per_retry >= 1 / SHARE:
        assert granted == requests // per_retry, "within the share all are granted"


def test_what_is_saved_up_is_bounded() -> None:
    budget = RetryBudget()
    assert budget.try_spend(1_000_000, 1000.0)
    assert sum(budget.try_spend(1_000_000, 1000.0) for _ in range(10_000)) == LARGEST - 1


# Exact counts


@pytest.mark.parametrize("kind", [kind for kind in KINDS if weight(an(kind)) == 1])
def test_the_third_failure_ejects(kind: type[UpstreamError]) -> None:
    state = EjectionState()
    assert [state.record_failure(an(kind), 1.0) for _ in range(4)] == [False, False, True, False]


def test_a_single_failure_is_known_until_a_success() -> None:
    state = EjectionState()
    state.record_failure(an(Disconnected), 1.0)
    assert state.has_failures
    state.reset()
    assert not state.has_failures


def test_an_error_that_does_not_count_ejects_no_server_that_was_ejected_before() -> None:
    state = EjectionState()
    state.record_failure(an(ConnectFailed), 0.0)
    assert state.expire(FIRST_PAUSE)
    assert not state.record_failure(an(ServerError), FIRST_PAUSE)
    assert state.record_failure(an(Disconnected), FIRST_PAUSE)


def test_the_kinds_of_failures() -> None:
    """A failure that one server causes counts once. Only a refused connection ejects at once."""
    assert {kind.__name__ for kind in KINDS if weight(an(kind)) == 1} == {
        "Disconnected",
        "FirstByteTimeout",
        "IdleTimeout",
        "BadResponse",
        "EngineDead",
        "Aborted",
        "Unresponsive",
    }
    assert {kind for kind in KINDS if weight(an(kind)) > 1} == {ConnectFailed, ConnectTimeout}


def test_each_request_adds_its_share_to_the_budget() -> None:
    budget = RetryBudget()
    assert sum(budget.try_spend(10, 1000.0) for _ in range(100)) == MINIMUM + 1
