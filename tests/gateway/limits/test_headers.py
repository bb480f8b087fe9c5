"""The headers of limits, as OpenAI names them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.decision import Holder
from gateway.limits.headers import budget_lines, duration, header_lines, laid_out_lines, layout_of
from gateway.limits.windows import BudgetState, NamedBudget, budget_states, moment
from gateway.snapshot.snapshot import Budget, Limits


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.017, "17ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3725.5, "1h2m5.5s"),
        (86267.648, "23h57m47.648s"),
    ],
)
def test_durations_are_written_as_go_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds).decode() == written


def test_the_tightest_limit_is_shown() -> None:
    wide, narrow = Limits(requests_per_minute=600), Limits(requests_per_minute=60, tokens_per_minute=5)
    requests, tokens = header_lines([(wide, 10.1, 0.0), (narrow, 67.0, 70.0)], 10.0).split(b"x-ratelimit-limit-tokens")
    assert requests == b"x-ratelimit-limit-requests: 60\r\nx-ratelimit-remaining-requests: 3\r\nx-ratelimit-reset-requests: 57s\r\n"
    assert tokens == b": 5\r\nx-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 1m0s\r\n"
    assert header_lines([(Limits(concurrent=1), 0.0, 0.0)], 0.0) == b""


def state(name: str, limit: int, used: int, reset: float = 60.0, soft: bool = False) -> BudgetState:
    kind, _, window = name.partition("_per_")
    return BudgetState(NamedBudget(name, limit, kind == "cost", soft), window, used, reset)


def test_the_tightest_budget_of_each_window_is_shown() -> None:
    states = [
        state("tokens_per_day", 1000, 100, 3725.5),
        state("tokens_per_day", 950, 100, 3725.5),
        state("tokens_per_7d", 5000, 6000),
        state("cost_per_month", 300_000_000_000, 29_500_000_001),
        state("tokens_per_30d", 10, 1, soft=True),
    ]
    assert budget_lines(states, 2.0).decode().split("\r\n") == [
        *("x-ratelimit-limit-tokens-day: 950", "x-ratelimit-remaining-tokens-day: 850", "x-ratelimit-reset-tokens-day: 1h2m5.5s"),
        *("x-ratelimit-limit-tokens-7d: 5000", "x-ratelimit-remaining-tokens-7d: 0", "x-ratelimit-reset-tokens-7d: 1m0s"),
        *("x-ratelimit-limit-cost-month: 300", "x-ratelimit-remaining-cost-month: 270.499999999", "x-ratelimit-reset-cost-month: 1m0s"),
        "",
    ]


some = st.none() | st.integers(1, 1000)
limits_once = st.builds(Limits, some, some, some, some, some, some, some, some, concurrent=some)


@given(limits_once, st.lists(st.floats(-10, 90), min_size=2, max_size=2), st.integers(0, 600), st.sampled_from([0.5, 0.8, 1.0]))
def test_the_layout_of_a_holder_gives_the_same_lines(limits: Limits, full: list[float], used: int, warn_at: float) -> None:
    at, holder = moment(100.0, 1_800_000_000.25), Holder.placed("key a", limits)
    day, week, month, _ = at.periods
    empty = [0.0] * 4
    counts = [used, used * 2.0, 0.0, 0.0, 0.0]
    cells = [100.0 + full[0], 100.0 + full[1], *empty[:2], day, *counts, month, *counts, week, *counts, 0.0]
    layout = layout_of([holder])
    assert layout is not None
    expected = header_lines([(limits, cells[0], cells[1])], at.now) + budget_lines(budget_states(holder.windows, cells, at), warn_at)
    found = laid_out_lines(layout, cells, at, warn_at)
    assert (
        found == expected
        if b"warning" not in expected and b": 0\r\nx-ratelimit-reset-tokens-" not in expected
        else found in (None, expected)
    )


def test_holders_whose_limits_must_be_compared_have_no_layout() -> None:
    one = Holder.placed("key a", Limits(requests_per_minute=5, tokens_per_day=5))
    assert layout_of([one, Holder.placed("team", Limits(tokens_per_minute=5, tokens_per_month=9))]) is not None
    assert layout_of([one, Holder.placed("team", Limits(tokens_per_day=9))]) is None
    assert layout_of([Holder.placed("key a", Limits(budgets=(Budget("day", tokens=5, soft=True),)))]) is None
    rolling = Limits(budgets=(Budget("7d", 7 * 86400, tokens=5),))
    assert layout_of([Holder.placed("key a", rolling, 0, {"7d": 30})]) is None


def test_a_new_period_has_no_lines_before_it_is_counted() -> None:
    holder = Holder.placed("key a", Limits(tokens_per_day=5))
    layout = layout_of([holder])
    assert layout is not None
    assert laid_out_lines(layout, [0.0] * 23, moment(100.0, 1_800_000_000.25), 1.0) is None


def test_a_budget_that_is_nearly_used_has_a_warning() -> None:
    states = [state("tokens_per_day", 1000, 799), state("cost_per_week", 1000, 800), state("cost_per_week", 1000, 859)]
    lines = budget_lines([*states, state("tokens_per_day", 1000, 2500, soft=True)], 0.8)
    assert lines.endswith(b"\r\nx-vllm-gateway-budget-warning: cost_per_week;used=0.85, tokens_per_day;used=2.50;soft\r\n")
