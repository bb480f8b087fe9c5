"""Rules of leases: what a lease admits and returns, and how large the next one is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.decision import Amounts, Holder
from gateway.limits.lease import DURATION, LEAST, MOST, PARTS, Lease, can_lease, next_amounts, seconds_of_lease
from gateway.limits.states import StoreResult
from gateway.limits.windows import session_window, states_of, windows_of
from gateway.snapshot.snapshot import Budget, Limits

LIMITS = Limits(requests_per_minute=60_000, tokens_per_minute=600_000, tokens_per_day=1_000_000, cost_per_month=10**12)
HOLDER = Holder.placed("key a", LIMITS)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 60), st.integers(0, 60)),
        st.tuples(st.just("end"), st.integers(0, 20), st.sampled_from([0.0, 0.4, 1.0, 2.0])),
    ),
    max_size=40,
)


def known(requests_full: float = 0.0, tokens_full: float = 0.0, tokens: int = 0, cost: int = 0, limits: Limits = LIMITS) -> StoreResult:
    """Return what a store reports at the time 0 about a holder with this use."""
    budgets = [(HOLDER, state) for window in windows_of(limits) for state in states_of(window, tokens, cost, 60.0)]
    return StoreResult(None, [(limits, requests_full, tokens_full)], budgets)


def lease(granted: Amounts) -> Lease:
    return Lease("lease", (HOLDER,), granted, 0.0, DURATION, known())


@given(_STEPS)
def test_what_a_lease_admits_and_what_it_returns_is_what_it_was_granted(steps: list[Any]) -> None:
    """Usage above a request's own reservation is charged to the lease, which then admits less."""
    granted = Amounts(8, 0, 100, 100)
    one, running, used = lease(granted), dict[str, Amounts](), Amounts()
    for number, (kind, first, second) in enumerate(steps):
        name = str(number)
        if kind == "come":
            amounts = Amounts(1, 0, first, second)
            left = one.requests, one.tokens, one.cost
            fits = left[0] >= 1 and left[1] >= first and left[2] >= second
            assert one.admit(name, amounts) is fits
            if fits:
                running[name] = amounts
        elif running:
            name = list(running)[first % len(running)]
            reserved = running.pop(name)
            spent = Amounts(1 if second else 0, 0, int(reserved.tokens * second), int(reserved.cost * second))
            assert one.settle(name, spent) and not one.settle(name, spent)
            used = _sum(used, spent)
        held = _sum(used, *running.values())
        assert (one.requests + held.requests, one.tokens + held.tokens, one.cost + held.cost) == (8, 100, 100)
        assert one.demand.requests >= 8 - one.requests and one.demand.tokens >= 100 - one.tokens
    ended = one.end()
    assert ended.used == used and ended.open_requests == tuple(running)
    still = _sum(*running.values())
    assert ended.reserved == Amounts(8 - still.requests, 0, 100 - still.tokens, 100 - still.cost)
    assert not any(one.settle(name, Amounts()) for name in running), "they are settled separately"


def _sum(*amounts: Amounts) -> Amounts:
    return Amounts(sum(each.requests for each in amounts), 0, sum(each.tokens for each in amounts), sum(each.cost for each in amounts))


@given(
    st.builds(Amounts, st.integers(0, 5000), st.just(0), st.integers(0, 10**6), st.integers(0, 10**13)),
    st.floats(0, 2 * DURATION),
    st.floats(0, 60),
    st.floats(0, 90),
    st.integers(0, 2_000_000),
    st.integers(0, 2 * 10**12),
)
def test_the_next_lease_leaves_most_of_each_limit_to_others(
    demand: Amounts, seconds: float, requests_full: float, tokens_full: float, tokens: int, cost: int
) -> None:
    amounts = next_amounts(demand, seconds, known(requests_full, tokens_full, tokens, cost), 0.0)
    if amounts is None:
        return
    assert LEAST <= amounts.requests <= MOST and amounts.slots == 0
    assert amounts.requests * PARTS <= 60_000 * (1 - requests_full / 60) + 1
    assert amounts.tokens * PARTS <= min(600_000 * (1 - tokens_full / 60) + 1, 1_000_000 - tokens) or not amounts.tokens
    assert amounts.cost * PARTS <= 10**12 - cost or not amounts.cost
    assert amounts.tokens * demand.requests >= LEAST * demand.tokens, "enough for several requests"


@pytest.mark.parametrize(
    ("demand", "seconds", "expected"),
    [
        (Amounts(15, 0, 150, 0), 1.0, None),
        (Amounts(20, 0, 200, 0), 1.0, Amounts(30, 0, 300, 0)),
        (Amounts(20, 0, 200, 0), 2.0, None),
        (Amounts(20, 0, 200, 0), 0.5, Amounts(60, 0, 600, 0)),
        (Amounts(20, 0, 200, 0), 0.0, Amounts(120, 0, 1200, 0)),
        (Amounts(5000, 0, 10_000, 0), 1.0, Amounts(1000, 0, 2000, 0)),
    ],
    ids=["few requests", "a second", "two seconds", "half a second", "at once", "many requests"],
)
def test_a_lease_follows_the_demand(demand: Amounts, seconds: float, expected: Amounts | None) -> None:
    assert next_amounts(demand, seconds, known(), 0.0) == expected


@pytest.mark.parametrize(
    "nearly_used",
    [known(requests_full=59.9), known(tokens_full=59.99), known(tokens=999_000), known(cost=10**12 - 10_000)],
    ids=["requests per minute", "tokens per minute", "tokens per day", "cost per month"],
)
def test_near_a_limit_there_is_no_lease(nearly_used: StoreResult) -> None:
    demand = Amounts(100, 0, 1000, 100_000)
    assert next_amounts(demand, 1.0, known(), 0.0) is not None
    assert next_amounts(demand, 1.0, nearly_used, 0.0) is None


def test_a_lease_has_at_least_the_amounts_of_sixteen_requests() -> None:
    assert LEAST == 16, "docs/limits-shared.md has this number"
    demand = Amounts(100, 0, 100)
    for tokens, expected in ((16, Amounts(150, 0, 16)), (15, None)):
        assert next_amounts(demand, 1.0, known(tokens=1_000_000 - PARTS * tokens), 0.0) == expected


def test_a_soft_budget_does_not_prevent_a_lease() -> None:
    limits = Limits(budgets=(Budget("day", tokens=100, soft=True),))
    assert next_amounts(Amounts(100, 0, 1000), 1.0, known(tokens=1_000_000, limits=limits), 0.0) == Amounts(150, 0, 1500)


def test_limits_whose_requests_the_store_decides() -> None:
    session = Holder("session", Limits(), 0, 0, (session_window(Budget("session", tokens=10), 7),))
    assert can_lease([HOLDER])
    assert not can_lease([])
    assert not can_lease([HOLDER, Holder.placed("team", Limits(concurrent=1000))])
    assert not can_lease([HOLDER, session])


@pytest.mark.parametrize(
    ("limits", "wall", "expected"),
    [
        (Limits(requests_per_minute=5), 86400 - 0.25, DURATION),
        (Limits(tokens_per_day=5), 86400 - 0.25, 0.25),
        (Limits(tokens_per_day=5), 86400.0, DURATION),
        (Limits(tokens_per_month=5), 31 * 86400 - 0.25, 0.25),
        (Limits(tokens_per_month=5), 30 * 86400 - 0.25, DURATION),
        (Limits(cost_per_week=5), 4 * 86400 - 0.25, 0.25),
        (Limits(budgets=(Budget("2h", 7200, 5),)), 3 * 300 - 0.25, 0.25),
    ],
)
def test_a_lease_ends_with_the_period_in_which_it_was_reserved(limits: Limits, wall: float, expected: float) -> None:
    holder = Holder.placed("team", limits, rings={"2h": 100})
    assert seconds_of_lease([holder], wall) == expected


def test_what_is_left_of_a_lease_is_shown_as_unused() -> None:
    one = Lease("lease", (HOLDER,), Amounts(100, 0, 1000, 500), 0.0, DURATION, known(0.1, 0.1, 1000, 500))
    assert one.admit("r1", Amounts(1, 0, 10, 5))
    now = one.current()
    assert [full for _, *full in now.full_times] == [[pytest.approx(0.001), pytest.approx(0.001)]]
    assert {state.budget.name: state.used for _, state in now.budgets} == {"tokens_per_day": 10, "cost_per_month": 5}


def test_the_demand_for_requests_alone_is_remembered() -> None:
    one = lease(Amounts(100, 0, 0, 0))
    for number in range(3):
        assert one.admit(f"r{number}", Amounts(1))
    for number in range(3):
        assert one.settle(f"r{number}", Amounts())
    assert (one.requests, one.demand) == (100, Amounts(3))


@pytest.mark.parametrize(
    ("used", "overdrawn"), [(Amounts(1, 0, 10, 10), False), (Amounts(1, 0, 11, 0), True), (Amounts(1, 0, 0, 11), True)], ids=str
)
def test_a_lease_of_which_everything_is_used_is_not_overdrawn(used: Amounts, overdrawn: bool) -> None:
    one = lease(Amounts(1, 0, 10, 10))
    assert one.admit("r1", Amounts(1, 0, 10, 10)) and one.settle("r1", used)
    assert one.is_overdrawn is overdrawn


@pytest.mark.parametrize(
    ("amounts", "small"), [(Amounts(1, 0, 25, 25), True), (Amounts(1, 0, 26, 25), False), (Amounts(1, 0, 25, 26), False)], ids=str
)
def test_a_small_request_is_a_quarter_of_a_lease_at_most(amounts: Amounts, small: bool) -> None:
    assert lease(Amounts(100, 0, 100, 100)).is_small(amounts) is small


def test_a_lease_that_is_used_up_is_shown_as_used() -> None:
    reported = known(0.5, 0.5, 1000, 500)
    one = Lease("lease", (HOLDER,), Amounts(1, 0, 10, 5), 0.0, DURATION, reported)
    assert one.admit("r1", Amounts(1, 0, 10, 5))
    assert one.current() == reported


def test_an_ended_lease_has_expired() -> None:
    one = lease(Amounts(requests=5, tokens=5))
    one.end()
    assert one.expires < one.began
