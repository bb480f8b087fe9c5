"""Write the state of limits as headers. Pure.

Limits per minute have OpenAI's headers, ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``. The headers of a budget end with its
window, like those of Cerebras: ``x-ratelimit-remaining-tokens-day``. Source: the guides of both on rate limits. ``reset`` is the time until
all of the limit is available again, as Go writes durations: ``17ms``, ``1s``, ``6m0s``. ``Retry-After`` is in ``refusals``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import ceil

import msgspec

from gateway.limits.decision import REQUESTS, TOKENS, BucketState, Holder, bucket_state, remaining_in_bucket
from gateway.limits.windows import SPENT, USED, BudgetState, Moment
from gateway.snapshot.money import decimal_text
from gateway.snapshot.snapshot import CALENDAR, Limits
from upstream.cells import Cells

WARNING = b"x-vllm-gateway-budget-warning"


def header_lines(buckets: Iterable[tuple[Limits, float, float]], now: float) -> bytes:
    """Return header lines for the tightest limit of each kind; none for a kind without limits.

    ``buckets``: limits, and when their buckets of requests and of tokens are full again.
    """
    requests, tokens = [], []
    for limits, requests_full, tokens_full in buckets:
        if limits.requests_per_minute is not None:
            requests.append(bucket_state(limits.requests_per_minute, requests_full, now))
        if limits.tokens_per_minute is not None:
            tokens.append(bucket_state(limits.tokens_per_minute, tokens_full, now))
    return _tightest(_REQUESTS, requests) + _tightest(_TOKENS, tokens)


def _tightest(lines: bytes, states: Sequence[BucketState]) -> bytes:
    if not states:
        return b""
    state = min(states, key=lambda each: (each.remaining, -each.reset))
    return lines % (state.limit, b"%d" % state.remaining, duration(state.reset))


class Layout(msgspec.Struct, frozen=True, gc=False):
    """The header lines of holders that have each kind of limit once, so that no limit must be compared with another.

    ``lines`` lacks the numbers that change: what remains of each limit, and when all of it is available. ``rates`` are the limits per
    minute with their buckets, ``budgets`` the budgets with the first cell of the window, the index of its period in
    ``Moment.periods``, the cell of what is used, and whether that is a cost.
    """

    lines: bytes
    rates: tuple[tuple[int, int], ...]
    budgets: tuple[tuple[float, int, int, int, bool], ...]


def layout_of(holders: Sequence[Holder]) -> Layout | None:
    """Return the layout of the holders' headers; None if they have a kind twice, a budget outside the calendar, or a soft budget."""
    rates, budgets, names, lines = [], [], [], []
    for kind, bucket, name in ((b"requests", REQUESTS, "requests_per_minute"), (b"tokens", TOKENS, "tokens_per_minute")):
        for holder in holders:
            if (limit := getattr(holder.limits, name)) is not None:
                rates.append((limit, holder.offset + bucket))
                names.append(name)
                lines.append(_LINES % (kind, kind, kind) % (limit, b"%d", b"%b"))
    for holder in holders:
        for window in holder.windows:
            start = window.start
            for budget in window.budgets:
                if budget.soft or window.name not in CALENDAR:
                    return None
                budgets.append((budget.limit, start, window.calendar, start + (SPENT if budget.is_cost else USED), budget.is_cost))
                names.append(budget.name)
                lines.append(_budget_format(budget.name, budget.limit))
    return Layout(b"".join(lines), tuple(rates), tuple(budgets)) if len(set(names)) == len(names) else None


def laid_out_lines(layout: Layout, cells: Cells, at: Moment, warn_at: float) -> bytes | None:
    """Return the same lines as ``header_lines`` and ``budget_lines``; None if a budget is nearly used, or has a new period."""
    now, wall, periods, period_ends = at.now, at.wall, at.periods, at.period_ends
    numbers: list[int | bytes] = []
    for limit, bucket in layout.rates:
        behind = cells[bucket] - now
        numbers += (limit, b"0s") if behind <= 0 else (remaining_in_bucket(limit, behind), duration(behind))
    for size, start, calendar, counted, is_cost in layout.budgets:
        used = cells[counted]
        if used >= size * warn_at or used >= size or cells[start] != periods[calendar]:
            return None
        left = int(size - used)
        reset = _duration(ceil((period_ends[calendar] - wall) * 1000 - 1e-3))  # ``duration``, without its call
        numbers += decimal_text(left).encode() if is_cost else left, reset
    return layout.lines % tuple(numbers)


def budget_lines(states: Iterable[BudgetState], warn_at: float) -> bytes:
    """Return header lines for the tightest budget of each kind and window, and a warning about each budget that is nearly used.

    A soft budget has only the warning. ``warn_at``: there is a warning once this share of a budget is used.
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
    return lines + b"%b: %b\r\n" % (WARNING, ", ".join(shown).encode())


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


_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%b\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUESTS, _TOKENS = (_LINES % (kind, kind, kind) for kind in (b"requests", b"tokens"))


def duration(seconds: float) -> bytes:
    """Write seconds as Go does, in whole milliseconds, rounded up."""
    return _duration(ceil(seconds * 1000 - 1e-3))


@lru_cache(maxsize=64)  # the responses of a millisecond show the same ends of days and months
def _duration(milliseconds: int) -> bytes:
    if milliseconds < 1000:
        return b"%dms" % milliseconds if milliseconds > 0 else b"0s"
    minutes, rest = divmod(milliseconds, 60_000)
    if not minutes:
        return b"%gs" % (rest / 1000)
    return b"%dm%gs" % (minutes, rest / 1000) if minutes < 60 else b"%dh%dm%gs" % (*divmod(minutes, 60), rest / 1000)
