"""Write the state of limits as headers. Pure.

Limits per minute have OpenAI's headers, ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``. The headers of a budget end with its
window, like those of Cerebras: ``x-ratelimit-remaining-tokens-day``. Source: the guides of both on rate limits. ``reset`` is the time until
all of the limit is available again, as Go writes durations: ``17ms``, ``1s``, ``6m0s``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil

from gateway.limits.rules import BucketState, bucket_state
from gateway.limits.windows import BudgetState
from gateway.snapshot.money import decimal_text
from gateway.snapshot.snapshot import Limits


def header_lines(buckets: Iterable[tuple[Limits, float, float]], now: float) -> bytes:
    """Return header lines for the tightest limit of each kind; none for a kind without limits.

    ``buckets``: limits, and when their buckets of requests and of tokens are full again.
    """
    requests: BucketState | None = None
    tokens: BucketState | None = None
    for limits, requests_full, tokens_full in buckets:
        if limits.requests_per_minute is not None:
            state = bucket_state(limits.requests_per_minute, requests_full, now)
            requests = state if requests is None else _tighter(requests, state)
        if limits.tokens_per_minute is not None:
            state = bucket_state(limits.tokens_per_minute, tokens_full, now)
            tokens = state if tokens is None else _tighter(tokens, state)
    lines = b"" if requests is None else _REQUESTS % (requests.limit, requests.remaining, duration(requests.reset))
    return lines if tokens is None else lines + _TOKENS % (tokens.limit, tokens.remaining, duration(tokens.reset))


def _tighter(one: BucketState, other: BucketState) -> BucketState:
    return one if (one.remaining, -one.reset) <= (other.remaining, -other.reset) else other


def budget_lines(states: Iterable[BudgetState], warn_at: float) -> bytes:
    """Return header lines for the tightest budget of each kind and window, and a warning about each budget that is nearly used.

    A soft budget has only the warning. ``warn_at``: the used share of a budget from which on there is a warning.
    """
    tightest: dict[str, BudgetState] = {}
    warnings: dict[tuple[str, bool], int] = {}
    for state in states:
        budget, used = state.budget, state.used
        name, limit, soft = budget.name, budget.limit, budget.soft
        if used >= limit * warn_at:
            warnings[name, soft] = max(warnings.get((name, soft), 0), int(used * 100 // limit))
        if not soft:
            other = tightest.get(name)
            if other is None or state.remaining < other.remaining:
                tightest[name] = state
    lines = b"".join(map(_budget_line, tightest.values()))
    if not warnings:
        return lines
    shown = (f"{name};used={percent / 100:.2f}{';soft' if soft else ''}" for (name, soft), percent in warnings.items())
    return lines + b"x-vllm-gateway-budget-warning: %b\r\n" % ", ".join(shown).encode()


def _budget_line(state: BudgetState) -> bytes:
    budget, used = state.budget, state.used
    limit, is_cost = budget.limit, budget.is_cost
    left = int(limit - used) if used < limit else 0
    lines = _budget_format(budget.name, limit)
    remaining = decimal_text(left).encode() if is_cost else left
    return lines % remaining if state.window == "session" else lines % (remaining, duration(state.reset))


@lru_cache(maxsize=4096)
def _budget_format(name: str, limit: float) -> bytes:
    """Return the lines of a budget without the numbers that change."""
    quantity, _, window = name.partition("_per_")
    is_cost, kind = quantity == "cost", f"{quantity}-{window}".encode()
    lines = b"x-ratelimit-limit-%b: %b\r\nx-ratelimit-remaining-%b: %b\r\n" % (
        kind,
        amount(limit, is_cost).encode(),
        kind,
        b"%b" if is_cost else b"%d",
    )
    return lines if window == "session" else lines + b"x-ratelimit-reset-%b: %%b\r\n" % kind


def amount(number: float, is_cost: bool) -> str:
    """Write whole tokens, or a cost in units of the currency."""
    return decimal_text(int(number)) if is_cost else str(int(number))


_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUESTS, _TOKENS = (_LINES % (kind, kind, kind) for kind in (b"requests", b"tokens"))


def duration(seconds: float) -> bytes:
    """Write seconds as Go does, in whole milliseconds, rounded up."""
    whole = ceil(seconds * 1000 - 1e-3)
    if whole < 1000:
        return b"%dms" % whole if whole > 0 else b"0s"
    return _seconds(whole) if whole < 60_000 else _minutes(whole // 60_000) + _seconds(whole % 60_000)


@lru_cache(maxsize=16)  # a response shows several ends that have these digits in common, and so do the responses of a millisecond
def _seconds(milliseconds: int) -> bytes:
    return b"%gs" % (milliseconds / 1000)


@lru_cache(maxsize=256)
def _minutes(count: int) -> bytes:
    return b"%dm" % count if count < 60 else b"%dh%dm" % divmod(count, 60)
