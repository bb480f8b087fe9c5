"""Decide about limits: whether a holder has capacity for a request, and what its counts are afterwards. Pure.

The rules: amounts are reserved from every limit or from none. Unused amounts are returned to the limits that they were reserved
from, as far as they are still missing there. A holder never gets more than its limits, even if a clock is changed. admit.lua and
settle.lua make the same decisions in a Redis; a change here needs the same change there.

Per-minute limits are token buckets, not fixed windows: a bucket holds the limit and refills evenly, so in ``t`` seconds no more
than ``limit * (1 + t / 60)`` pass. A bucket stores the time at which it will be full, by a monotonic clock. That may be more than a
minute ahead if a request used more than it had reserved. Budgets of days, weeks, months and rolling windows are counted by ``windows``.

Amounts that time has refilled must not be returned as well, or more than the limit would pass. A bucket refills in the order of its
reservations. A reservation is missing until the bucket was to be full with it, or earlier by the amounts that other requests have
returned since. So a bucket also counts returned amounts, and a request remembers the sum of both: the ``end`` of its reservation.
If other requests have returned later amounts, the returned amount can be too small, but never too large.

The counts of a holder are ``SIZE`` numbers in an array of cells, from an ``offset``. So workers can share them, and a request
creates no objects for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gateway.limits import windows
from gateway.limits.windows import Cells, Moment, PlacedWindow, windows_of
from gateway.snapshot.snapshot import CALENDAR, Limits

REQUESTS, TOKENS = 0, 1
"""Offsets of the two buckets: when each is full again. The first is at the offset of the holder itself."""
_BACK = 2
"""After a bucket: the total of seconds that were returned to it."""
DAY, MONTH, WEEK = 4, 10, 16
"""Offsets of the windows of the calendar."""
SIZE = 22

_OFFSETS = dict(zip(CALENDAR, (DAY, WEEK, MONTH), strict=True))
_MINUTE = 60.0
_ROUNDING = 1e-6
"""Tolerance for rounding errors of floating-point numbers, in seconds."""


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """Amounts that a request reserves or has used. ``slots`` are concurrent requests; ``cost`` is in nano-units."""

    requests: int = 0
    slots: int = 0
    tokens: int = 0
    cost: int = 0


class Holder(NamedTuple):
    """A holder of limits. ``offset`` is the first cell of its counts. ``windows`` have its budgets."""

    name: str
    limits: Limits
    offset: int
    windows: tuple[PlacedWindow, ...]

    @classmethod
    def placed(cls, name: str, limits: Limits, offset: int = 0, rings: Mapping[str, int] | None = None) -> Holder:
        """Make a holder. ``rings`` are the offsets of its rolling windows by name."""
        offsets = {window: offset + behind for window, behind in _OFFSETS.items()} | dict(rings or {})
        return cls(name, limits, offset, tuple((window, offsets[window.name]) for window in windows_of(limits)))

    @property
    def counts_tokens(self) -> bool:
        """Whether it has a limit on tokens or cost."""
        return bool(self.windows) or self.limits.tokens_per_minute is not None


class ExceededLimit(NamedTuple):
    """A limit without enough capacity: its name in the configuration and its size.

    ``wait`` is in seconds, None if it cannot be known. Limits on tokens and cost also have what is ``left`` and what was
    ``requested``. Costs are in nano-units.
    """

    reason: str
    limit: float
    wait: float | None
    left: float = 0.0
    requested: float = 0.0

    @property
    def is_budget(self) -> bool:
        """Whether it is a budget, which lasts longer than a client waits."""
        return self.reason not in RATES


RATES = ("requests_per_minute", "tokens_per_minute", "concurrent")
"""The limits that are not budgets. They are also reasons in the metrics."""


def exceeded_limit(holder: Holder, cells: Cells, in_flight: float, amounts: Amounts, at: Moment) -> ExceededLimit | None:
    """Return the exceeded limit with the longest wait; None if the amounts can be reserved."""
    limits, offset = holder.limits, holder.offset
    if amounts.slots and limits.concurrent is not None and in_flight + amounts.slots > limits.concurrent:
        return ExceededLimit("concurrent", limits.concurrent, None)
    worst: ExceededLimit | None = None
    if amounts.requests and limits.requests_per_minute is not None:
        wait = _wait(cells[offset + REQUESTS] - at.now, limits.requests_per_minute, amounts.requests)
        if wait:
            worst = ExceededLimit("requests_per_minute", limits.requests_per_minute, wait)
    if amounts.tokens and limits.tokens_per_minute is not None:
        behind = cells[offset + TOKENS] - at.now
        wait = _wait(behind, limits.tokens_per_minute, amounts.tokens)
        if wait and (worst is None or wait > (worst.wait or 0)):
            left = limits.tokens_per_minute * (1 - behind / _MINUTE)
            worst = ExceededLimit("tokens_per_minute", limits.tokens_per_minute, wait, left, amounts.tokens)
    for budget in windows.exceeded_budgets(holder.windows, cells, amounts.tokens, amounts.cost, at):
        found = ExceededLimit(*budget)
        worst = found if worst is None or is_longer(found, worst) else worst
    return worst


def is_longer(one: ExceededLimit, other: ExceededLimit) -> bool:
    """Check whether a limit is reported instead of another: its wait is longer or unknown."""
    return other.wait is not None and (one.wait is None or one.wait > other.wait)


def _wait(behind: float, limit: float, amount: float) -> float:
    """Return the seconds until a bucket, which is full in ``behind`` seconds, holds an amount or is full."""
    wait = behind - _MINUTE * (1 - amount / limit) if amount < limit else behind
    return wait if wait > _ROUNDING else 0.0


def admit(
    holder: Holder, cells: Cells, in_flight: float, amounts: Amounts, at: Moment, reservation_ends: dict[int, float]
) -> ExceededLimit | None:
    """Reserve the amounts and return None; or reserve nothing and return the exceeded limit.

    ``reservation_ends`` receives the end of each reservation by the offset of its bucket; ``settle`` needs it. The new counts usually show
    that all amounts fit; ``exceeded_limit`` is called only if they do not.
    """
    limits, requests_bucket, budgets = holder.limits, holder.offset, holder.windows
    now, tokens, cost, tokens_bucket = at.now, amounts.tokens, amounts.cost, requests_bucket + TOKENS
    full, latest = cells[requests_bucket], now + _MINUTE
    by_requests = (full if full > now else now) + amounts.requests * limits.request_seconds
    full, seconds = cells[tokens_bucket], tokens * limits.token_seconds
    by_tokens = (full if full > now else now) + (seconds if seconds < _MINUTE else _MINUTE)
    if not (
        by_requests <= latest
        and by_tokens <= latest
        and in_flight + amounts.slots <= limits.at_once
        and (not budgets or not (tokens or cost) or windows.fits(budgets, cells, tokens, cost, at))
    ):
        refusal = exceeded_limit(holder, cells, in_flight, amounts, at)
        if refusal is not None:
            return refusal
    if amounts.requests:
        cells[requests_bucket] = by_requests
        reservation_ends[requests_bucket] = by_requests + cells[requests_bucket + _BACK]
    if tokens:
        cells[tokens_bucket] = by_tokens
        reservation_ends[tokens_bucket] = by_tokens + cells[tokens_bucket + _BACK]
    if budgets and (tokens or cost):
        windows.reserve(budgets, cells, tokens, cost, at)
    return None


def settle(
    holder: Holder,
    cells: Cells,
    reserved: Amounts,
    used: Amounts,
    reservation_ends: Mapping[int, float],
    now: float,
    then: Moment,
) -> None:
    """Replace what was reserved at ``then`` by what was used. ``reservation_ends`` is what ``admit`` has set."""
    for_requests, for_tokens = settlement_of_buckets(holder.limits, reserved, used)
    if for_requests:
        _settle_bucket(cells, holder.offset + REQUESTS, for_requests, reservation_ends, now)
    if for_tokens:
        _settle_bucket(cells, holder.offset + TOKENS, for_tokens, reservation_ends, now)
    if holder.windows:
        windows.settle(holder.windows, cells, (reserved.tokens, reserved.cost), (used.tokens, used.cost), then)


def settlement_of_buckets(limits: Limits, reserved: Amounts, used: Amounts) -> tuple[float, float]:
    """Return the seconds to take from the buckets of requests and tokens at settlement; negative: to return."""
    each = limits.token_seconds
    in_advance = reserved.tokens * each
    return (
        (used.requests - reserved.requests) * limits.request_seconds,
        used.tokens * each - (in_advance if in_advance < _MINUTE else _MINUTE),
    )


def _settle_bucket(cells: Cells, bucket: int, seconds: float, reservation_ends: Mapping[int, float], now: float) -> None:
    """Take seconds from a bucket, or return as many as time has not refilled since."""
    full = cells[bucket]
    if seconds > 0:
        cells[bucket] = (full if full > now else now) + seconds
        return
    back = cells[bucket + _BACK]
    missing = reservation_ends.get(bucket, 0.0) - back - now
    given = missing if missing < -seconds else -seconds
    if given > 0:
        cells[bucket], cells[bucket + _BACK] = full - given, back + given


class BucketState(msgspec.Struct, frozen=True, gc=False):
    """State of a per-minute limit: its size, what remains, and the seconds until all of it is available."""

    limit: int
    remaining: int
    reset: float


def bucket_state(limit: int, full: float, now: float) -> BucketState:
    """Return the state of a bucket that is full at a moment."""
    behind = full - now
    if behind <= 0:
        return BucketState(limit, limit, 0.0)
    left = int(limit * (1 - behind / _MINUTE) + _ROUNDING)
    return BucketState(limit, left if left > 0 else 0, behind)
