"""The headers of limits, as OpenAI names them."""

from __future__ import annotations

import pytest

from gateway.limits.headers import budget_lines, duration, header_lines
from gateway.limits.windows import BudgetState, NamedBudget
from gateway.snapshot.snapshot import Limits


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


def test_a_budget_that_is_nearly_used_has_a_warning() -> None:
    states = [state("tokens_per_day", 1000, 799), state("cost_per_week", 1000, 800), state("cost_per_week", 1000, 859)]
    lines = budget_lines([*states, state("tokens_per_day", 1000, 2500, soft=True)], 0.8)
    assert lines.endswith(b"\r\nx-vllm-gateway-budget-warning: cost_per_week;used=0.85, tokens_per_day;used=2.50;soft\r\n")
