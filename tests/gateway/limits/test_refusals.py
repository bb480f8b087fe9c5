"""The message of a refusal by a limit: the state of the limit, and how the request can pass."""

from __future__ import annotations

import pytest

from gateway.limits.decision import RATES
from gateway.limits.estimate import TokenEstimate
from gateway.limits.refusals import refusal
from gateway.limits.windows import ExceededLimit
from tests.support.money import price

DAY = "tokens_per_day"


LARGE = "This request reserves 33,747 tokens, more than the whole limit of 20,000 tokens per day (key a). "
PART = "This request reserves a cost of 0.3, and of the limit of a cost of 0.5 per day only 0.25 is left (key a). "
SMALL = "This request reserves a cost of 1.000000001, and of the limit of a cost of 9,000,000 per day only 0.000000001 is left (key a). "
MINUTE = "This request reserves 1,047 tokens, more than the whole limit of 500 tokens per minute (key a). "
SESSION = (
    "This request reserves a cost of 0.3, and of the limit of a cost of 0.5 per session only 0.25 is left (key a). "
    "Set 'max_tokens' to at most 12,412, or start a new session."
)
TABLE: dict[str, tuple[ExceededLimit, TokenEstimate, str, str | None]] = {
    "at once": (
        ExceededLimit("concurrent", 5, None),
        TokenEstimate(),
        "The limit of 5 requests at once is reached (key a). Try again in 1 second.",
        "1",
    ),
    "used up": (
        ExceededLimit(DAY, 20_000, 31_284, 0, 347),
        TokenEstimate(46, 301),
        "The limit of 20,000 tokens per day is reached (key a). Try again in 8 hours 42 minutes.",
        "31284",
    ),
    "too large, and fits with fewer tokens": (
        ExceededLimit(DAY, 20_000, 31_284, 17_000, 33_747),
        TokenEstimate(1747, 32_000),
        f"{LARGE}Set 'max_tokens' to at most 15,253.",
        None,
    ),
    "too large, and nothing is left": (
        ExceededLimit(DAY, 20_000, 31_284, 100, 33_747),
        TokenEstimate(1747, 32_000),
        f"{LARGE}Set 'max_tokens' to at most 18,253; it then fits in 8 hours 42 minutes, when the limit is free again.",
        None,
    ),
    "too large an input": (
        ExceededLimit(DAY, 20_000, 31_284, 100, 33_747),
        TokenEstimate(33_746, 1),
        f"{LARGE}Shorten the input, or ask the operator for a higher limit.",
        None,
    ),
    "too large for a minute": (
        ExceededLimit("tokens_per_minute", 500, 31, 250, 1047),
        TokenEstimate(47, 1000),
        f"{MINUTE}Set 'max_tokens' to at most 203, or try again in 31 seconds.",
        "31",
    ),
    "too large for a minute of which nothing is left": (
        ExceededLimit("tokens_per_minute", 500, 31, 0, 1047),
        TokenEstimate(47, 1000),
        f"{MINUTE}Try again in 31 seconds.",
        "31",
    ),
    "a cost of two choices": (
        ExceededLimit("cost_per_day", 500_000_000, 3600, 250_000_000, 300_000_000),
        TokenEstimate(1747, 16_000, 2),
        f"{PART}Set 'max_tokens' to at most 12,412, or try again in 1 hour.",
        "3600",
    ),
    "a cost with all of its digits": (
        ExceededLimit("cost_per_day", 9_000_000_000_000_000, 3600, 1, 1_000_000_001),
        TokenEstimate(100, 1),
        f"{SMALL}Try again in 1 hour.",
        "3600",
    ),
    "a rolling window": (
        ExceededLimit("tokens_per_7d", 2000, 90_000, 40, 1047),
        TokenEstimate(47, 1000),
        "This request reserves 1,047 tokens, and of the limit of 2,000 tokens per 7d only 40 are left (key a). Try again in 1 day 1 hour.",
        "90000",
    ),
    "a session that is used up": (
        ExceededLimit("tokens_per_session", 2000, None, 0, 1047),
        TokenEstimate(47, 1000),
        "The limit of 2,000 tokens per session is reached (key a). Start a new session.",
        None,
    ),
    "a session in which a shorter response fits": (
        ExceededLimit("cost_per_session", 500_000_000, None, 250_000_000, 300_000_000),
        TokenEstimate(1747, 16_000, 2),
        SESSION,
        None,
    ),
    "a request larger than the budget of a session": (
        ExceededLimit("tokens_per_session", 2000, None, 500, 5047),
        TokenEstimate(5000, 47),
        "This request reserves 5,047 tokens, more than the whole limit of 2,000 tokens per session (key a). Start a new session.",
        None,
    ),
    "a cost of an input": (
        ExceededLimit("cost_per_day", 500_000_000, 3600, 250_000_000, 300_000_000),
        TokenEstimate(300_000),
        f"{PART}Try again in 1 hour.",
        "3600",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_messages(name: str) -> None:
    refused, guess, message, retry_after = TABLE[name]
    raised = refusal("key a", refused, guess, price(1.0, 10.0) if refused.reason.startswith("cost") else None)
    assert raised.message == message
    assert raised.headers.get("retry-after") == retry_after
    assert (raised.headers.get("x-should-retry") == "false") == (refused.reason not in RATES)


def test_a_shorter_response_of_free_tokens_costs_no_less() -> None:
    exceeded = ExceededLimit("cost_per_day", 500_000_000, 3600, 250_000_000, 300_000_000)
    assert refusal("key a", exceeded, TokenEstimate(300_000, 16_000), price(1.0, 0.0)).message == f"{PART}Try again in 1 hour."
