"""Decide about limits: whether a holder has capacity for a request, and what its counts are afterwards. Pure.

The rules: amounts are reserved from every limit or from none. Unused amounts are returned to the limits that they were reserved
from, as far as they are still missing there. A holder never gets more than its limits, even if a clock is changed.
redis/admit.lua and redis/settle.lua make the same decisions as ``admit`` and ``settle`` in a Redis; a change here needs the same change
there, and tests/gateway/limits/redis/test_store.py compares them.

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

import msgspec

from gateway.limits import windows
from gateway.limits.windows import SPENT, USED, ExceededLimit, Moment, Window, windows_of
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


class Holder(msgspec.Struct, frozen=True, gc=False):
    """A holder of limits. ``offset`` is the first cell of its counts. ``windows`` have its budgets.

    ``first_slot`` is the first cell of its requests in flight, 0 if they are not counted. ``number`` is that of its end user, 0 for
    other holders (see ``user_table``).
    """

    name: str
    limits: Limits
    offset: int
    first_slot: int
    windows: tuple[Window, ...]
    number: float = 0.0

    @classmethod
    def placed(cls, name: str, limits: Limits, offset: int = 0, rings: Mapping[str, int] | None = None) -> Holder:
        """Make a holder. ``rings`` are the offsets of its rolling windows by name."""
        starts = {window: offset + behind for window, behind in _OFFSETS.items()} | dict(rings or {})
        found = tuple(msgspec.structs.replace(each, start=starts[each.name]) for each in windows_of(limits))
        return cls(name, limits, offset, offset + SIZE, found)

    @property
    def counts_tokens(self) -> bool:
        """Whether it has a limit on tokens or cost."""
        return bool(self.windows) or self.limits.tokens_per_minute is not None


RATES = ("requests_per_minute", "tokens_per_minute", "concurrent")
"""The limits that are not budgets. They are also reasons in the metrics."""


def admit(
    wanted: Sequence[tuple[Holder, Amounts]],
    cells: Cells,
    at: Moment,
    reservation_ends: dict[int, float],
    worker: int = 0,
    workers: int = 1,
) -> tuple[Holder, ExceededLimit] | None:
    """Reserve all amounts and return None; or reserve nothing, and return the holder that refuses for the longest time and its limit.

    ``reservation_ends`` receives the end of each reservation by the offset of its bucket. ``settle`` needs it for the buckets of what was
    reserved, and ignores other buckets, such as the buckets of a refused attempt. One pass over the holders collects the refusals and the
    new counts, which are written if there is no refusal.
    """
    now = at.now
    latest = now + _MINUTE + _ROUNDING
    changes: dict[int, float] = {}
    other_windows: list[tuple[Window, Amounts]] = []
    refusals: list[tuple[Holder, ExceededLimit]] = []
    for holder, amounts in wanted:
        limits, first = holder.limits, holder.offset
        if amounts.slots and holder.first_slot:
            slot = holder.first_slot + worker
            in_flight = changes[slot] = cells[slot] + amounts.slots
            if workers > 1 and limits.at_once != inf:
                in_flight = in_flight_of(holder, cells, workers) + amounts.slots
            if in_flight > limits.at_once:
                refusals.append((holder, exceeded_rate(holder, amounts, "concurrent", 0.0, 0.0)))
        for bucket, seconds in (
            (first, amounts.requests * limits.request_seconds),
            (first + TOKENS, amounts.tokens * limits.token_seconds),
        ):
            if seconds:
                full = cells[bucket]
                full = (full if full > now else now) + (seconds if seconds < _MINUTE else _MINUTE)
                changes[bucket], reservation_ends[bucket] = full, full + cells[bucket + _BACK]
                if full > latest:
                    left = (_MINUTE - cells[bucket] + now) / (limits.request_seconds if bucket == first else limits.token_seconds)
                    refusals.append((holder, exceeded_rate(holder, amounts, RATES[bucket - first], full - now - _MINUTE, left)))
        if holder.windows and (amounts.tokens or amounts.cost):
            _add_to_windows(holder, amounts, cells, at, changes, other_windows, refusals)
    if refusals:
        return _longest(refusals)
    for offset, count in changes.items():
        cells[offset] = count
    for window, amounts in other_windows:
        windows.reserve(window, cells, amounts.tokens, amounts.cost, at)
    return None


def _longest(refusals: Sequence[tuple[Holder, ExceededLimit]]) -> tuple[Holder, ExceededLimit]:
    """Return the refusal with the longest wait; of equal waits the first, whatever their rounding: as ``refuse`` in admit.lua."""
    found, longest = refusals[0], -1.0
    for refusal in refusals:
        wait = inf if refusal[1].wait is None else refusal[1].wait
        if wait > longest + _ROUNDING:
            found, longest = refusal, wait
    return found


def _add_to_windows(
    holder: Holder,
    amounts: Amounts,
    cells: Cells,
    at: Moment,
    changes: dict[int, float],
    other_windows: list[tuple[Window, Amounts]],
    refusals: list[tuple[Holder, ExceededLimit]],
) -> None:
    """Collect the new counts and the refusals of a holder's windows, and the windows whose first cells are not the current period."""
    tokens, cost, periods = amounts.tokens, amounts.cost, at.periods
    for window in holder.windows:
        start = window.start
        is_current = cells[start] == periods[window.calendar]
        if is_current:
            used, spent = cells[start + USED], cells[start + SPENT]
        else:
            used, spent = windows.used_in(window, cells, at)
            other_windows.append((window, amounts))
        if tokens:
            ahead = window.tokens_ahead
            total = used + (tokens if tokens < ahead else ahead)
            if is_current:
                changes[start + USED] = total
            if total > window.tokens:
                refusals.append((holder, windows.exceeded(window, False, used, total, tokens, cells, at)))
        if cost:
            ahead = window.cost_ahead
            total = spent + (cost if cost < ahead else ahead)
            if is_current:
                changes[start + SPENT] = total
            if total > window.cost:
                refusals.append((holder, windows.exceeded(window, True, spent, total, cost, cells, at)))


def exceeded_rate(holder: Holder, amounts: Amounts, reason: str, wait: float, left: float) -> ExceededLimit:
    """Return the exceeded limit with a name of ``RATES``."""
    limit: int = getattr(holder.limits, reason)
    if reason == "tokens_per_minute":
        return ExceededLimit(reason, limit, wait, left, amounts.tokens)
    return ExceededLimit(reason, limit, None if reason == "concurrent" else wait)


def in_flight_of(holder: Holder, cells: Cells, workers: int) -> float:
    """Return a holder's requests in flight in all workers."""
    first = holder.offset + SIZE
    return cells[first] if workers == 1 else sum(cells[each] for each in range(first, first + workers))


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
    used_tokens = used.tokens
    for holder, amounts in reserved:
        bucket, limits, tokens = holder.offset, holder.limits, amounts.tokens
        token_seconds = limits.token_seconds
        if holder.first_slot:
            cells[holder.first_slot + worker] -= amounts.slots
        if limits.request_seconds and used.requests != amounts.requests:
            _settle_bucket(cells, bucket, (used.requests - amounts.requests) * limits.request_seconds, reservation_ends, now)
        if token_seconds:
            in_advance = tokens * token_seconds
            seconds = used_tokens * token_seconds - (in_advance if in_advance < _MINUTE else _MINUTE)
            _settle_bucket(cells, bucket + TOKENS, seconds, reservation_ends, now)
        for window in holder.windows:
            start, ahead = window.start, window.tokens_ahead
            if cells[start] == then.periods[window.calendar]:
                total = cells[start + USED] + used_tokens - (tokens if tokens < ahead else ahead)
                cells[start + USED] = total if total > 0.0 else 0.0
                cost = amounts.cost
                if cost or used.cost:
                    total = cells[start + SPENT] + used.cost - (cost if cost < window.cost_ahead else window.cost_ahead)
                    cells[start + SPENT] = total if total > 0.0 else 0.0
            else:
                windows.settle(window, cells, (tokens, amounts.cost), (used_tokens, used.cost), then)


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
