"""Decide about limits: whether a holder has capacity for a request, and what its counts are afterwards. Pure.

The rules: amounts are reserved from every limit or from none. Unused amounts are returned to the limits that they were reserved
from, as far as they are still missing there. A holder never gets more than its limits, even if a clock is changed. admit.lua and
settle.lua make the same decisions in a Redis; a change here needs the same change there.

Per-minute limits are token buckets, not fixed windows: a bucket holds the limit and refills evenly, so in ``t`` seconds no more
than ``limit * (1 + t / 60)`` pass. A bucket stores the time at which it will be full, by a monotonic clock. That may be more than a
minute ahead if a request used more than it had reserved. Days and months are those of UTC. The previous period is remembered, so a
clock that is set back finds its counts again.

Amounts that time has refilled must not be returned as well, or more than the limit would pass. A bucket refills in the order of its
reservations. A reservation is missing until the bucket was to be full with it, or earlier by the amounts that other requests have
returned since. So a bucket also counts returned amounts, and a request remembers the sum of both: the ``end`` of its reservation.
If other requests returned later amounts, less is returned than possible, never more.

The counts of a holder are ``SIZE`` numbers in an array of cells, from an ``offset``. So workers can share them, and a request
creates no objects for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec

from gateway.snapshot.snapshot import Limits

REQUESTS, TOKENS = 0, 1
"""Offsets of the two buckets: when each is full again."""
_BACK = 2
"""Behind a bucket: the seconds that were ever returned to it."""
DAY, MONTH = 4, 10
"""Offsets of the two windows: the period, and what was used in it."""
USED, SPENT = 1, 2
"""Behind a period: its tokens and its cost in nano-units."""
_OTHER = 3
"""Behind the current period of a window: the other period that was used last."""
SIZE = 16

_MINUTE = 60.0
_DAY_SECONDS = 86400
_EPOCH = date(1970, 1, 1).toordinal()
_ROUNDING = 1e-6
"""Tolerance for rounding errors of floating-point numbers, in seconds."""


class Cells(Protocol):
    """An array of numbers that holds the counts."""

    def __getitem__(self, index: int, /) -> float:
        """Return one number."""

    def __setitem__(self, index: int, value: float, /) -> None:
        """Change one number."""


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """Amounts that a request reserves or has used. ``slots`` are concurrent requests; ``cost`` is in nano-units."""

    requests: int = 0
    slots: int = 0
    tokens: int = 0
    cost: int = 0


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A point in time.

    ``now`` is monotonic; ``wall`` is in seconds since the epoch, with its ``day`` since the epoch and its ``month`` since the year
    0.
    """

    now: float
    wall: float
    day: int
    month: int


def moment(now: float, wall: float) -> Moment:
    """Make a Moment from the times of both clocks."""
    day = int(wall // _DAY_SECONDS)
    return Moment(now, wall, day, month_of(day))


@lru_cache(maxsize=64)
def month_of(day: int) -> int:
    """Return the month since the year 0 for a day since the epoch. The twin in Lua is in calendar.lua."""
    found = date.fromordinal(_EPOCH + day)
    return found.year * 12 + found.month - 1


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


QUOTAS = frozenset({"tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"})
"""Limits on days and months, which last longer than a client waits."""


def amount(reason: str, amounts: Amounts) -> float:
    """Return the amount of tokens or cost that counts for a limit; 0 for other limits."""
    kind = reason.partition("_")[0]
    return amounts.tokens if kind == "tokens" else amounts.cost if kind == "cost" else 0.0


def exceeded_limit(limits: Limits, cells: Cells, offset: int, in_flight: float, amounts: Amounts, at: Moment) -> ExceededLimit | None:
    """Return the exceeded limit with the longest wait; None if the amounts can be reserved."""
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
    if limits.calendar:
        of_day, cost_of_day, of_month, cost_of_month = limits.quotas
        tokens_of_day = _exceeded_quota(cells, offset + DAY, at.day, amounts, of_day, cost_of_day)
        if tokens_of_day is not None:
            worst = _longest_quota(worst, limits, tokens_of_day, "day", _DAY_SECONDS - at.wall % _DAY_SECONDS)
        tokens_of_month = _exceeded_quota(cells, offset + MONTH, at.month, amounts, of_month, cost_of_month)
        if tokens_of_month is not None:
            worst = _longest_quota(worst, limits, tokens_of_month, "month", _seconds_left_in_month(at.wall))
    return worst


def is_longer(one: ExceededLimit, other: ExceededLimit) -> bool:
    """Check whether a limit is reported rather than another: its wait is longer or unknown."""
    return other.wait is not None and (one.wait is None or one.wait > other.wait)


def _wait(behind: float, limit: float, amount: float) -> float:
    """Return the seconds until a bucket, which is full in ``behind`` seconds, holds an amount or is full."""
    wait = behind - _MINUTE * (1 - amount / limit) if amount < limit else behind
    return wait if wait > _ROUNDING else 0.0


class _ExceededQuota(NamedTuple):
    kind: str
    left: float
    requested: float


def _exceeded_quota(cells: Cells, window: int, period: int, amounts: Amounts, of_tokens: float, of_cost: float) -> _ExceededQuota | None:
    """Return the limit of a period without capacity for the amounts. A request may use a whole quota."""
    known = _find_period(cells, window, period)
    if known is None:
        return None
    used, spent = cells[known + USED], cells[known + SPENT]
    if amounts.tokens and used + min(amounts.tokens, of_tokens) > of_tokens:
        return _ExceededQuota("tokens", of_tokens - used, amounts.tokens)
    if amounts.cost and spent + min(amounts.cost, of_cost) > of_cost:
        return _ExceededQuota("cost", of_cost - spent, amounts.cost)
    return None


def _find_period(cells: Cells, window: int, period: int) -> int | None:
    """Return the offset of a period; None if it is neither of the two that are remembered."""
    if cells[window] == period:
        return window
    return window + _OTHER if cells[window + _OTHER] == period else None


def _longest_quota(worst: ExceededLimit | None, limits: Limits, reached: _ExceededQuota, period: str, seconds: float) -> ExceededLimit:
    quota = f"{reached.kind}_per_{period}"
    found = ExceededLimit(quota, getattr(limits, quota), seconds, reached.left, reached.requested)
    return found if worst is None or is_longer(found, worst) else worst


def _seconds_left_in_month(wall: float) -> float:
    now = datetime.fromtimestamp(wall, UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return ((first + timedelta(days=32)).replace(day=1) - now).total_seconds()


def admit(
    limits: Limits, cells: Cells, offset: int, in_flight: float, amounts: Amounts, at: Moment, reservation_ends: dict[int, float]
) -> ExceededLimit | None:
    """Reserve the amounts and return None; or reserve nothing and return the exceeded limit.

    ``reservation_ends`` receives the end of each reservation by the offset of its bucket; ``settle`` needs it. The new counts mostly
    show at once that everything fits; ``exceeded_limit`` is called only if they do not.
    """
    now, tokens, cost = at.now, amounts.tokens, amounts.cost
    full, latest = cells[offset + REQUESTS], now + _MINUTE
    by_requests = (full if full > now else now) + amounts.requests * limits.request_seconds
    full, seconds = cells[offset + TOKENS], tokens * limits.token_seconds
    by_tokens = (full if full > now else now) + (seconds if seconds < _MINUTE else _MINUTE)
    fits = by_requests <= latest and by_tokens <= latest and in_flight + amounts.slots <= limits.at_once
    of_calendar = limits.calendar and (tokens or cost)
    if of_calendar:
        day, month = offset + DAY, offset + MONTH
        of_day, cost_of_day, of_month, cost_of_month = limits.quotas
        tokens_of_day, cost_of_this_day, tokens_of_month, cost_of_this_month = _reserved_of_calendar(limits, tokens, cost)
        fits = (
            fits
            and cells[day] == at.day
            and cells[month] == at.month
            and cells[day + USED] + tokens_of_day <= of_day
            and cells[month + USED] + tokens_of_month <= of_month
            and (
                not cost
                or (cells[day + SPENT] + cost_of_this_day <= cost_of_day and cells[month + SPENT] + cost_of_this_month <= cost_of_month)
            )
        )
    if not fits:
        refusal = exceeded_limit(limits, cells, offset, in_flight, amounts, at)
        if refusal is not None:
            return refusal
    if amounts.requests:
        cells[offset + REQUESTS] = by_requests
        reservation_ends[offset + REQUESTS] = by_requests + cells[offset + REQUESTS + _BACK]
    if tokens:
        cells[offset + TOKENS] = by_tokens
        reservation_ends[offset + TOKENS] = by_tokens + cells[offset + TOKENS + _BACK]
    if of_calendar:
        if not fits:
            _start_period(cells, day, at.day)
            _start_period(cells, month, at.month)
        cells[day + USED] += tokens_of_day
        cells[month + USED] += tokens_of_month
        if cost:
            cells[day + SPENT] += cost_of_this_day
            cells[month + SPENT] += cost_of_this_month
    return None


def settle(
    limits: Limits,
    cells: Cells,
    offset: int,
    reserved: Amounts,
    used: Amounts,
    reservation_ends: Mapping[int, float],
    now: float,
    then: Moment,
) -> None:
    """Replace what was reserved at ``then`` by what was used. ``reservation_ends`` is what ``admit`` has set."""
    for_requests, for_tokens = settlement_of_buckets(limits, reserved, used)
    if for_requests:
        _settle_bucket(cells, offset + REQUESTS, for_requests, reservation_ends, now)
    if for_tokens:
        _settle_bucket(cells, offset + TOKENS, for_tokens, reservation_ends, now)
    if limits.calendar:
        tokens_of_day, cost_of_this_day, tokens_of_month, cost_of_this_month = settlement_of_calendar(limits, reserved, used)
        _add_to_period(cells, offset + DAY, then.day, tokens_of_day, cost_of_this_day)
        _add_to_period(cells, offset + MONTH, then.month, tokens_of_month, cost_of_this_month)


def settlement_of_buckets(limits: Limits, reserved: Amounts, used: Amounts) -> tuple[float, float]:
    """Return the seconds to take from the buckets of requests and tokens at settlement; negative: to return."""
    each = limits.token_seconds
    in_advance = reserved.tokens * each
    return (
        (used.requests - reserved.requests) * limits.request_seconds,
        used.tokens * each - (in_advance if in_advance < _MINUTE else _MINUTE),
    )


def settlement_of_calendar(limits: Limits, reserved: Amounts, used: Amounts) -> tuple[float, float, float, float]:
    """Return what to add at settlement to the tokens and cost of the day and of the month."""
    tokens_of_day, cost_of_this_day, tokens_of_month, cost_of_this_month = _reserved_of_calendar(limits, reserved.tokens, reserved.cost)
    return used.tokens - tokens_of_day, used.cost - cost_of_this_day, used.tokens - tokens_of_month, used.cost - cost_of_this_month


def _reserved_of_calendar(limits: Limits, tokens: float, cost: float) -> tuple[float, float, float, float]:
    """Return what is reserved from the tokens and cost of the day and of the month.

    It is never more than the whole limit, or the request could never pass.
    """
    of_day, cost_of_day, of_month, cost_of_month = limits.in_advance
    return (
        tokens if tokens < of_day else of_day,
        cost if cost < cost_of_day else cost_of_day,
        tokens if tokens < of_month else of_month,
        cost if cost < cost_of_month else cost_of_month,
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


def _start_period(cells: Cells, window: int, period: int) -> None:
    """Make a period the current one, and remember the later one of the two other known periods."""
    if cells[window] == period:
        return
    other, fresh = window + _OTHER, (period, 0.0, 0.0)
    before = cells[window], cells[window + USED], cells[window + SPENT]
    known = cells[other], cells[other + USED], cells[other + SPENT]
    if known[0] == period or before[0] > known[0]:
        cells[other], cells[other + USED], cells[other + SPENT] = before
    cells[window], cells[window + USED], cells[window + SPENT] = known if known[0] == period else fresh


def _add_to_period(cells: Cells, window: int, period: int, tokens: float, cost: float) -> None:
    """Add to what was used in a period, or subtract. A period that is no longer remembered stays unchanged."""
    known = _find_period(cells, window, period)
    if known is None:
        return
    if tokens:
        used = cells[known + USED] + tokens
        cells[known + USED] = used if used > 0 else 0.0
    if cost:
        spent = cells[known + SPENT] + cost
        cells[known + SPENT] = spent if spent > 0 else 0.0


class PeriodUse(NamedTuple):
    """The use of a day and of a month: tokens, and cost in nano-units."""

    tokens_of_day: int = 0
    cost_of_day: int = 0
    tokens_of_month: int = 0
    cost_of_month: int = 0

    def beyond(self, known: PeriodUse) -> PeriodUse:
        """Return by how much this exceeds the known use; nothing is negative."""
        return PeriodUse(*(max(own - other, 0) for own, other in zip(self, known, strict=True)))


def period_starts(day: int) -> tuple[int, int]:
    """Return when a day and its month start, in seconds since the epoch. ``day`` is since the epoch."""
    first = date.fromordinal(_EPOCH + day).replace(day=1)
    return day * _DAY_SECONDS, (first.toordinal() - _EPOCH) * _DAY_SECONDS


def add_earlier_use(cells: Cells, offset: int, day: int, used: PeriodUse) -> None:
    """Add what was used of a day and its month before these cells counted. What they counted since stays."""
    month = month_of(day)
    _start_period(cells, offset + DAY, day)
    _start_period(cells, offset + MONTH, month)
    _add_to_period(cells, offset + DAY, day, used.tokens_of_day, used.cost_of_day)
    _add_to_period(cells, offset + MONTH, month, used.tokens_of_month, used.cost_of_month)


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
