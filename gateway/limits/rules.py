"""Decide about limits: whether a holder has capacity for a request, and what its counts are afterwards. Pure.

The rules: amounts are reserved from every limit or from none. Unused amounts are returned to the limits that they were reserved
from, as far as they are still missing there. A holder never gets more than its limits, even if a clock is changed.
redis/admit.lua and redis/settle.lua make the same decisions in a Redis; a change here needs the same change there.

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

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from gateway.limits import windows
from gateway.limits.windows import SPENT, USED, FlatWindow, Moment, PlacedWindow, windows_of
from gateway.snapshot.snapshot import CALENDAR, Limits
from upstream.cells import Cells

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


Terms = tuple[int, int, float, float, float, tuple[FlatWindow, ...]]
"""The facts about a holder that ``admit`` and ``settle`` need: the offset of its counts, the first cell of its requests in flight (0: they
are not counted), the seconds of a request and of a token, the most requests at once, and the windows. It is a plain tuple, because
unpacking one is the cheapest way to read several values."""


class Holder(NamedTuple):
    """A holder of limits. ``offset`` is the first cell of its counts. ``windows`` have its budgets."""

    name: str
    limits: Limits
    offset: int
    windows: tuple[PlacedWindow, ...]
    terms: Terms

    @classmethod
    def placed(cls, name: str, limits: Limits, offset: int = 0, rings: Mapping[str, int] | None = None) -> Holder:
        """Make a holder. ``rings`` are the offsets of its rolling windows by name."""
        offsets = {window: offset + behind for window, behind in _OFFSETS.items()} | dict(rings or {})
        return cls.with_windows(name, limits, offset, offset + SIZE, [(each, offsets[each.name]) for each in windows_of(limits)])

    @classmethod
    def with_windows(cls, name: str, limits: Limits, offset: int, first_slot: int, placed: Iterable[PlacedWindow]) -> Holder:
        """Make a holder with these windows. ``first_slot``: see ``Terms``."""
        found = tuple(placed)
        flat = tuple(windows.flattened(each) for each in found)
        return cls(name, limits, offset, found, (offset, first_slot, limits.request_seconds, limits.token_seconds, limits.at_once, flat))

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
    wanted: Sequence[tuple[Holder, Amounts]],
    cells: Cells,
    at: Moment,
    reservation_ends: dict[int, float],
    worker: int = 0,
    workers: int = 1,
) -> tuple[Holder, ExceededLimit] | None:
    """Reserve all amounts and return None; or reserve nothing, and return the holder that refuses for the longest time and its limit.

    ``reservation_ends`` receives the end of each reservation by the offset of its bucket; ``settle`` needs it for the buckets of what was
    reserved, and ignores others, such as those of a refused attempt. One pass over the flat terms of the holders collects the new counts,
    and they are written if all of them fit. ``exceeded_limit`` is called only if they seem not to.
    """
    now, periods = at.now, at.periods
    latest = now + _MINUTE
    changes: dict[int, float] = {}
    other_windows: list[tuple[PlacedWindow, Amounts]] = []
    for holder, amounts in wanted:
        bucket, first_slot, request_seconds, token_seconds, at_once, flat_windows = holder.terms
        requests, slots, tokens, cost, fits = amounts.requests, amounts.slots, amounts.tokens, amounts.cost, True
        if requests and request_seconds:
            full = cells[bucket]
            changes[bucket] = full = (full if full > now else now) + requests * request_seconds
            reservation_ends[bucket] = full + cells[bucket + _BACK]
            fits = full <= latest
        if slots and first_slot:
            in_flight = changes[first_slot + worker] = cells[first_slot + worker] + slots
            if workers > 1 and at_once != inf:
                in_flight = in_flight_of(holder, cells, workers) + slots
            fits = fits and in_flight <= at_once
        if tokens and token_seconds:
            bucket += TOKENS
            full, seconds = cells[bucket], tokens * token_seconds
            changes[bucket] = full = (full if full > now else now) + (seconds if seconds < _MINUTE else _MINUTE)
            reservation_ends[bucket] = full + cells[bucket + _BACK]
            fits = fits and full <= latest
        if flat_windows and (tokens or cost):
            for placed, calendar, start, token_limit, cost_limit, tokens_ahead, cost_ahead in flat_windows:
                if cells[start] == periods[calendar]:
                    changes[start + USED] = total = cells[start + USED] + (tokens if tokens < tokens_ahead else tokens_ahead)
                    if cost and cost_ahead:
                        changes[start + SPENT] = spent = cells[start + SPENT] + (cost if cost < cost_ahead else cost_ahead)
                        fits = fits and spent <= cost_limit
                    fits = fits and total <= token_limit
                else:
                    other_windows.append((placed, amounts))
                    fits = fits and windows.fits((placed,), cells, tokens, cost, at)
        if not fits and exceeded_limit(holder, cells, in_flight_of(holder, cells, workers), amounts, at) is not None:
            return _longest_refusal(wanted, cells, workers, at)
    for offset, count in changes.items():
        cells[offset] = count
    for placed, amounts in other_windows:
        windows.reserve((placed,), cells, amounts.tokens, amounts.cost, at)
    return None


def in_flight_of(holder: Holder, cells: Cells, workers: int) -> float:
    """Return a holder's requests in flight in all workers."""
    first = holder.offset + SIZE
    return cells[first] if workers == 1 else sum(cells[each] for each in range(first, first + workers))


def _longest_refusal(
    wanted: Sequence[tuple[Holder, Amounts]], cells: Cells, workers: int, at: Moment
) -> tuple[Holder, ExceededLimit] | None:
    """Return the holder that refuses for the longest time."""
    worst: tuple[Holder, ExceededLimit] | None = None
    for holder, amounts in wanted:
        refusal = exceeded_limit(holder, cells, in_flight_of(holder, cells, workers), amounts, at)
        if refusal is not None and (worst is None or is_longer(refusal, worst[1])):
            worst = holder, refusal
    return worst


def settle(
    reserved: Iterable[tuple[Holder, Amounts]],
    cells: Cells,
    used: Amounts,
    reservation_ends: Mapping[int, float],
    now: float,
    then: Moment,
    worker: int = 0,
) -> None:
    """Replace what was reserved at ``then`` by what was used. ``reservation_ends`` is what ``admit`` has set.

    The seconds of the buckets are those of ``settlement_of_buckets``, and the amounts of the windows those of ``windows.settlement``.
    """
    periods, used_tokens, used_cost = then.periods, used.tokens, used.cost
    for holder, amounts in reserved:
        bucket, first_slot, request_seconds, token_seconds, _, flat_windows = holder.terms
        tokens = amounts.tokens
        if first_slot:
            cells[first_slot + worker] -= amounts.slots
        if request_seconds and used.requests != amounts.requests:
            _settle_bucket(cells, bucket, (used.requests - amounts.requests) * request_seconds, reservation_ends, now)
        if token_seconds:
            in_advance = tokens * token_seconds
            seconds = used_tokens * token_seconds - (in_advance if in_advance < _MINUTE else _MINUTE)
            _settle_bucket(cells, bucket + TOKENS, seconds, reservation_ends, now)
        for placed, calendar, start, _, _, tokens_ahead, cost_ahead in flat_windows:
            if cells[start] == periods[calendar]:
                total = cells[start + USED] + used_tokens - (tokens if tokens < tokens_ahead else tokens_ahead)
                cells[start + USED] = total if total > 0.0 else 0.0
                cost = amounts.cost
                if cost or used_cost:
                    total = cells[start + SPENT] + used_cost - (cost if cost < cost_ahead else cost_ahead)
                    cells[start + SPENT] = total if total > 0.0 else 0.0
            else:
                windows.settle((placed,), cells, (tokens, amounts.cost), (used_tokens, used_cost), then)


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
    return BucketState(limit, remaining_in_bucket(limit, behind), behind)


def remaining_in_bucket(limit: int, behind: float) -> int:
    """Return what remains in a bucket that will be full in ``behind`` seconds."""
    left = int(limit * (1 - behind / _MINUTE) + _ROUNDING)
    return left if left > 0 else 0
