"""Rows of the ledger restore what limits would have counted, for every window, key, team and model."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.budget_holders import Budgets, UsedSince, beyond
from gateway.limits.decision import Amounts
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import BudgetState, counted_starts, moment, windows_of
from gateway.snapshot.snapshot import Allowance, Budget, Issuer, Key, Limits, Model, PerUser, Snapshot

MANY = 10**12
LIMITS = Limits(
    tokens_per_day=MANY,
    tokens_per_week=MANY,
    cost_per_month=MANY,
    budgets=(Budget("7d", 7 * 86400.0, tokens=MANY, cost=MANY), Budget("90m", 5400.0, tokens=MANY, soft=True)),
)
SNAPSHOT = Snapshot(
    1,
    (
        Key(
            "a",
            team="lab",
            allowances=(Allowance("key a", LIMITS), Allowance("key a for b*", LIMITS, ("b*",)), Allowance("team lab", LIMITS)),
        ),
        Key("staff", allowances=(Allowance("key staff", LIMITS),)),
        Key("staff/known", allowances=()),
        Key("lab/staff", allowances=(Allowance("key lab/staff", LIMITS),)),
        Key("free", allowances=(Allowance("key free", Limits(requests_per_minute=1)),)),
    ),
    (Model("small", ()), Model("large", (), aliases=("big",))),
    issuers=(Issuer("https://id.example", ("gateway",), ("staff", "free", "lab/staff"), ("RS256",)),),
)
NOW = datetime(2027, 3, 1, 0, 30, tzinfo=UTC).timestamp()


class Request(NamedTuple):
    """A finished request: the seconds before NOW, tokens and cost."""

    ago: float
    tokens: int
    cost: int


def restored(requests: list[Request], now: float) -> list[BudgetState]:
    budgets, at = Budgets(SNAPSHOT), moment(0.0, now)
    starts = budgets.counted_starts(at)
    times = [now - each.ago for each in requests]
    rows = [
        UsedSince("a", None, "small", bisect_right(starts, time) - 1, each.tokens, each.cost)
        for each, time in zip(requests, times, strict=True)
        if time >= starts[0]
    ]
    with closing(Buckets.private()) as buckets:
        for one in budgets.use_by_holder(rows, starts, at).values():
            buckets.add_earlier_use(buckets.holder(one.allowance.holder, one.allowance.limits), one.used)
        return buckets.budget_states(buckets.holder("key a", LIMITS), at)


def counted(requests: list[Request], now: float) -> list[BudgetState]:
    """Return the states after limits have counted the same requests as they came."""
    with closing(Buckets.private()) as buckets:
        holder = buckets.holder("key a", LIMITS)
        for each in sorted(requests, reverse=True):
            at, used = moment(0.0, now - each.ago), Amounts(tokens=each.tokens, cost=each.cost)
            assert buckets.reserve([(holder, used)], at, {}) is None
            buckets.settle([(holder, used)], {}, used, at, 0.0)
        return buckets.budget_states(holder, moment(0.0, now))


REQUESTS = st.builds(
    Request,
    st.one_of(st.floats(0, 86400), st.floats(0, 8 * 86400), st.floats(0, 40 * 86400)),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
)


@given(st.lists(REQUESTS, max_size=30), st.floats(NOW, NOW + 40 * 86400))
def test_restored_counts_equal_those_of_a_gateway_that_never_stopped(requests: list[Request], now: float) -> None:
    assert restored(requests, now) == counted(requests, now)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (datetime(2027, 2, 28, 23, 59, 59, tzinfo=UTC), {"day": (2027, 2, 28), "week": (2027, 2, 22), "month": (2027, 2, 1)}),
        (datetime(2027, 3, 1, tzinfo=UTC), {"day": (2027, 3, 1), "week": (2027, 3, 1), "month": (2027, 3, 1)}),
        (datetime(2028, 2, 29, 12, tzinfo=UTC), {"day": (2028, 2, 29), "week": (2028, 2, 28), "month": (2028, 2, 1)}),
        (datetime(2027, 1, 1, tzinfo=UTC), {"day": (2027, 1, 1), "week": (2026, 12, 28), "month": (2027, 1, 1)}),
    ],
)
def test_periods_start_with_the_day_the_week_and_the_month(now: datetime, expected: dict[str, tuple[int, int, int]]) -> None:
    limits, at = Limits(tokens_per_day=1, tokens_per_week=1, tokens_per_month=1), moment(0.0, now.timestamp())
    found = {window.name: counted_starts(window, at) for window in windows_of(limits)}
    assert found == {name: [datetime(*day, tzinfo=UTC).timestamp()] for name, day in expected.items()}


@pytest.mark.parametrize(
    ("key", "team", "model", "holders"),
    [
        ("a", None, "small", {"key a"}),
        ("a", "lab", "large", {"key a", "key a for b*", "team lab"}),
        ("a", "lab", "b-removed", {"key a", "key a for b*", "team lab"}),
        ("a", "other", None, {"key a"}),
        ("removed", "lab", "small", {"team lab"}),
        ("staff/x", None, "small", {"key staff/x"}),
        ("staff/x/y", "lab", "small", {"key staff/x/y", "team lab"}),
        ("staff/known", None, "small", set()),
        ("lab%2Fstaff/x/y", None, "small", {"key lab%2Fstaff/x/y"}),
        ("free/x", None, "small", set()),
        ("staffing", None, "small", set()),
    ],
)
def test_a_row_counts_for_its_key_its_team_and_its_model(key: str, team: str | None, model: str | None, holders: set[str]) -> None:
    budgets, at = Budgets(SNAPSHOT), moment(0.0, NOW)
    starts = budgets.counted_starts(at)
    assert set(budgets.use_by_holder([UsedSince(key, team, model, len(starts) - 1, 1, 1)], starts, at)) == holders


def per_user(owner: str, missing: str = "shared") -> Allowance:
    return Allowance(f"{owner} each user", LIMITS, users=PerUser(missing))


HEADER = Key("header", user_header=b"x-user", team="lab", allowances=(per_user("key header"), per_user("team lab")))
FIELD = Key("field", allowances=(per_user("key field"),))
UNNAMED = Key("unnamed", user_header=b"x-user", allowances=(per_user("key unnamed", "unlimited"),))
OF_USERS = Snapshot(
    1,
    (HEADER, FIELD, UNNAMED, Key("staff", allowances=(per_user("key staff"),))),
    (),
    issuers=(Issuer("https://id.example", ("gateway",), ("staff",), ("RS256",)),),
    teams={"lab": (per_user("team lab"),)},
    ledger_user=True,
)


@pytest.mark.parametrize(
    ("key", "team", "user", "holders"),
    [
        ("header", "lab", "J%C3%BCrgen ", {"key header user j%C3%BCrgen", "team lab user j%C3%BCrgen"}),
        ("header", None, None, {"key header without user"}),
        ("field", None, "Jane%20Doe", {"key field user jane%2520doe"}),
        ("unnamed", None, None, set()),
        ("unnamed", None, "x", {"key unnamed user x"}),
        ("staff/Alice", "lab", "other", {"key staff user staff%2FAlice", "team lab user staff%2FAlice"}),
        ("removed", "lab", "jane", {"team lab user jane"}),
    ],
)
def test_a_row_counts_for_its_end_user(key: str, team: str | None, user: str | None, holders: set[str]) -> None:
    budgets, at = Budgets(OF_USERS), moment(0.0, NOW)
    starts = budgets.counted_starts(at)
    assert budgets.counts_users
    found = budgets.use_by_holder([UsedSince(key, team, "m", len(starts) - 1, 1, 1, user)], starts, at)
    assert set(found) == holders
    named = {one.end_user for one in found.values() if one.of_users is not None}
    assert named == {name.partition(" user ")[2] for name in holders if " without " not in name}


def test_fields_of_bodies_that_the_ledger_does_not_store_count_for_no_end_user() -> None:
    budgets, at = Budgets(replace(OF_USERS, ledger_user=False)), moment(0.0, NOW)
    starts = budgets.counted_starts(at)
    assert budgets.use_by_holder([UsedSince("field", None, "m", len(starts) - 1, 1, 1)], starts, at) == {}


def test_only_the_difference_to_what_was_added_is_added() -> None:
    used = {("day", 1): (10, 5), ("month", 1): (10, 5), ("7d", 3): (1, 0)}
    assert beyond(used, {("day", 1): (10, 5), ("month", 1): (4, 9)}) == {("month", 1): (6, 0), ("7d", 3): (1, 0)}
