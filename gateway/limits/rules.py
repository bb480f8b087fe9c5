"""The decisions about limits: whether a holder has room for what is asked for, and what its meter says after that.

Pure, but that a meter is changed where it stands. The rules: what is asked for is taken from every limit or from none; what is not
used is given back to where it was taken, as far as it is still missing there; a holder never gets more than its limits, whatever
the clock does.

A minute's limit is a bucket that holds the limit and is filled evenly, so in ``t`` seconds no more than ``limit * (1 + t / 60)``
pass, and the turn of a minute means nothing. Of a bucket it is kept when it is full again, in seconds of a clock
that never goes back; it may lie further ahead than a minute, when more was used than had been reserved. Days and
months are the calendar's, in UTC; the one before is remembered, so a clock that is set back finds its counts again.

What time has filled up again must not be given back once more, or more would pass than is promised. A bucket is filled up in the
order in which it was taken from: what a request has reserved is missing until the moment at which the bucket was to be full with
it, or earlier by as much as others have given back since. So a bucket also counts what it was given back, and a request remembers
both as one sum, the ``end`` of what it has reserved. All that was given back since may have lain behind it in the order: then less
is given back than could be, never more.

A meter is ``SIZE`` numbers among others, from a first one on: so workers share them, and so a request makes no values of what it
only looks at or adds to (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec

from gateway.snapshot.snapshot import Limits

REQUESTS, TOKENS = 0, 1
"""Of a meter, when those buckets are full again."""
_BACK = 2
"""Behind a bucket: the seconds that were ever given back to it."""
DAY, MONTH = 4, 10
"""Where a window of a meter begins: a period, and what was used in it."""
USED, SPENT = 1, 2
"""Behind a period: its tokens and its cost."""
_OTHER = 3
"""Behind a window's present period: the latest other one that was looked at, in the same way."""
SIZE = 16

_MINUTE = 60.0
_DAY_SECONDS = 86400
_EPOCH = date(1970, 1, 1).toordinal()
_ROUNDING = 1e-6
"""Seconds that floating-point numbers may be off."""


class Cells(Protocol):
    """Numbers of which some are a meter's."""

    def __getitem__(self, place: int, /) -> float:
        """One of them."""

    def __setitem__(self, place: int, value: float, /) -> None:
        """Change one."""


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """What a request takes or has used. ``slots`` are places among those that are served at once."""

    requests: int = 0
    slots: int = 0
    tokens: int = 0
    cost: float = 0.0


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A point in time: ``now`` by a clock that never goes back, ``wall`` in seconds since the epoch, with its ``day`` since the
    epoch and its ``month`` since the year 0."""

    now: float
    wall: float
    day: int
    month: int


def moment(now: float, wall: float) -> Moment:
    """A point in time, by both clocks."""
    day = int(wall // _DAY_SECONDS)
    return Moment(now, wall, day, month_of(day))


@lru_cache(maxsize=64)
def month_of(day: int) -> int:
    """The month, since the year 0, of a day since the epoch."""
    found = date.fromordinal(_EPOCH + day)
    return found.year * 12 + found.month - 1


class ExceededLimit(NamedTuple):
    """A limit that has no room: its name in the configuration, its size, and the seconds after which this would be admitted; None: nobody
    can know. Of tokens and costs also what is left of it, and what this would have reserved."""

    reason: str
    limit: float
    wait: float | None
    left: float = 0.0
    requested: float = 0.0


QUOTAS = frozenset({"tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"})
"""The limits that last longer than one would wait for."""


def amount(reason: str, ask: Amounts) -> float:
    """How much of a limit on tokens or costs is asked for; of another there is no amount."""
    kind = reason.partition("_")[0]
    return ask.tokens if kind == "tokens" else ask.cost if kind == "cost" else 0.0


def exceeded_limit(limits: Limits, cells: Cells, meter: int, in_flight: float, ask: Amounts, at: Moment) -> ExceededLimit | None:
    """The limit that stands longest in the way of a request; None if it is to be admitted."""
    if ask.slots and limits.concurrent is not None and in_flight + ask.slots > limits.concurrent:
        return ExceededLimit("concurrent", limits.concurrent, None)
    worst: ExceededLimit | None = None
    if ask.requests and limits.requests_per_minute is not None:
        wait = _wait(cells[meter + REQUESTS] - at.now, limits.requests_per_minute, ask.requests)
        if wait:
            worst = ExceededLimit("requests_per_minute", limits.requests_per_minute, wait)
    if ask.tokens and limits.tokens_per_minute is not None:
        behind = cells[meter + TOKENS] - at.now
        wait = _wait(behind, limits.tokens_per_minute, ask.tokens)
        if wait and (worst is None or wait > (worst.wait or 0)):
            left = limits.tokens_per_minute * (1 - behind / _MINUTE)
            worst = ExceededLimit("tokens_per_minute", limits.tokens_per_minute, wait, left, ask.tokens)
    if limits.calendar:
        of_day, cost_of_day, of_month, cost_of_month = limits.quotas
        for_day = _exceeded_quota(cells, meter + DAY, at.day, ask, of_day, cost_of_day)
        if for_day is not None:
            worst = _longer(worst, limits, for_day, "day", _DAY_SECONDS - at.wall % _DAY_SECONDS)
        for_month = _exceeded_quota(cells, meter + MONTH, at.month, ask, of_month, cost_of_month)
        if for_month is not None:
            worst = _longer(worst, limits, for_month, "month", _left_of_month(at.wall))
    return worst


def is_longer(one: ExceededLimit, other: ExceededLimit) -> bool:
    """Whether a refusal is to be told rather than another: nobody can know its end, or it lasts longer."""
    return other.wait is not None and (one.wait is None or one.wait > other.wait)


def _wait(behind: float, limit: float, amount: float) -> float:
    """Seconds until a bucket that is full in ``behind`` seconds holds an amount, or is full where the amount is more than all of it."""
    wait = behind - _MINUTE * (1 - amount / limit) if amount < limit else behind
    return wait if wait > _ROUNDING else 0.0


class _ExceededQuota(NamedTuple):
    kind: str
    left: float
    requested: float


def _exceeded_quota(cells: Cells, window: int, period: int, ask: Amounts, of_tokens: float, of_cost: float) -> _ExceededQuota | None:
    """Which limit of a period has no room for what is asked for, or for all of itself where that is less."""
    known = _find_period(cells, window, period)
    if known is None:
        return None
    used, spent = cells[known + USED], cells[known + SPENT]
    if ask.tokens and used + min(ask.tokens, of_tokens) > of_tokens:
        return _ExceededQuota("tokens", of_tokens - used, ask.tokens)
    if ask.cost and spent + min(ask.cost, of_cost) > of_cost:
        return _ExceededQuota("cost", of_cost - spent, ask.cost)
    return None


def _find_period(cells: Cells, window: int, period: int) -> int | None:
    """Where what was used of a period is; None: of neither of the two that are remembered."""
    if cells[window] == period:
        return window
    return window + _OTHER if cells[window + _OTHER] == period else None


def _longer(worst: ExceededLimit | None, limits: Limits, reached: _ExceededQuota, period: str, seconds: float) -> ExceededLimit:
    quota = f"{reached.kind}_per_{period}"
    found = ExceededLimit(quota, getattr(limits, quota), seconds, reached.left, reached.requested)
    return found if worst is None or is_longer(found, worst) else worst


def _left_of_month(wall: float) -> float:
    now = datetime.fromtimestamp(wall, UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return ((first + timedelta(days=32)).replace(day=1) - now).total_seconds()


def admit(
    limits: Limits, cells: Cells, meter: int, in_flight: float, ask: Amounts, at: Moment, ends: dict[int, float]
) -> ExceededLimit | None:
    """Take what is asked for; or nothing, and tell why.

    ``ends`` learns, by a bucket's place, until when what was taken of it is missing; ``settle`` needs it again. What the meter would
    say afterwards mostly shows that all of it fits in; only where it does not ``exceeded_limit`` is asked.
    """
    now, tokens, cost = at.now, ask.tokens, ask.cost
    full, latest = cells[meter + REQUESTS], now + _MINUTE
    by_requests = (full if full > now else now) + ask.requests * limits.request_seconds
    full, seconds = cells[meter + TOKENS], tokens * limits.token_seconds
    by_tokens = (full if full > now else now) + (seconds if seconds < _MINUTE else _MINUTE)
    fits = by_requests <= latest and by_tokens <= latest and in_flight + ask.slots <= limits.at_once
    of_calendar = limits.calendar and (tokens or cost)
    if of_calendar:
        day, month = meter + DAY, meter + MONTH
        of_day, cost_of_day, of_month, cost_of_month = limits.quotas
        for_day, cost_for_day, for_month, cost_for_month = _reserved_of_calendar(limits, tokens, cost)
        fits = (
            fits
            and cells[day] == at.day
            and cells[month] == at.month
            and cells[day + USED] + for_day <= of_day
            and cells[month + USED] + for_month <= of_month
            and (not cost or (cells[day + SPENT] + cost_for_day <= cost_of_day and cells[month + SPENT] + cost_for_month <= cost_of_month))
        )
    if not fits:
        refusal = exceeded_limit(limits, cells, meter, in_flight, ask, at)
        if refusal is not None:
            return refusal
    if ask.requests:
        cells[meter + REQUESTS] = by_requests
        ends[meter + REQUESTS] = by_requests + cells[meter + REQUESTS + _BACK]
    if tokens:
        cells[meter + TOKENS] = by_tokens
        ends[meter + TOKENS] = by_tokens + cells[meter + TOKENS + _BACK]
    if of_calendar:
        if not fits:
            _start_period(cells, day, at.day)
            _start_period(cells, month, at.month)
        cells[day + USED] += for_day
        cells[month + USED] += for_month
        if cost:
            cells[day + SPENT] += cost_for_day
            cells[month + SPENT] += cost_for_month
    return None


def settle(
    limits: Limits, cells: Cells, meter: int, reserved: Amounts, used: Amounts, ends: Mapping[int, float], now: float, then: Moment
) -> None:
    """Put what was used in the place of what was reserved at a moment. ``ends``: as ``admit`` has told them."""
    for_requests, for_tokens = settlement_of_buckets(limits, reserved, used)
    if for_requests:
        _settle_bucket(cells, meter + REQUESTS, for_requests, ends, now)
    if for_tokens:
        _settle_bucket(cells, meter + TOKENS, for_tokens, ends, now)
    if limits.calendar:
        for_day, cost_for_day, for_month, cost_for_month = settlement_of_calendar(limits, reserved, used)
        _add_to_period(cells, meter + DAY, then.day, for_day, cost_for_day)
        _add_to_period(cells, meter + MONTH, then.month, for_month, cost_for_month)


def settlement_of_buckets(limits: Limits, reserved: Amounts, used: Amounts) -> tuple[float, float]:
    """What is taken from the buckets of requests and tokens, or is to be given back to them, in seconds, when a request is settled."""
    each = limits.token_seconds
    in_advance = reserved.tokens * each
    return (
        (used.requests - reserved.requests) * limits.request_seconds,
        used.tokens * each - (in_advance if in_advance < _MINUTE else _MINUTE),
    )


def settlement_of_calendar(limits: Limits, reserved: Amounts, used: Amounts) -> tuple[float, float, float, float]:
    """What is added then to the tokens and the cost of a day, and to those of a month."""
    for_day, cost_for_day, for_month, cost_for_month = _reserved_of_calendar(limits, reserved.tokens, reserved.cost)
    return used.tokens - for_day, used.cost - cost_for_day, used.tokens - for_month, used.cost - cost_for_month


def _reserved_of_calendar(limits: Limits, tokens: float, cost: float) -> tuple[float, float, float, float]:
    """What is taken when a request begins of the tokens and the cost of a day, and of a month: never more than all of a limit, or it
    could never be had."""
    of_day, cost_of_day, of_month, cost_of_month = limits.in_advance
    return (
        tokens if tokens < of_day else of_day,
        cost if cost < cost_of_day else cost_of_day,
        tokens if tokens < of_month else of_month,
        cost if cost < cost_of_month else cost_of_month,
    )


def _settle_bucket(cells: Cells, bucket: int, seconds: float, ends: Mapping[int, float], now: float) -> None:
    """Take more from a bucket; or give some back of what was reserved, no more than what time has not filled up since."""
    full = cells[bucket]
    if seconds > 0:
        cells[bucket] = (full if full > now else now) + seconds
        return
    back = cells[bucket + _BACK]
    missing = ends.get(bucket, 0.0) - back - now
    given = missing if missing < -seconds else -seconds
    if given > 0:
        cells[bucket], cells[bucket + _BACK] = full - given, back + given


def _start_period(cells: Cells, window: int, period: int) -> None:
    """Make a period the present one. Of two others that were known the later is remembered."""
    if cells[window] == period:
        return
    other, fresh = window + _OTHER, (period, 0.0, 0.0)
    before = cells[window], cells[window + USED], cells[window + SPENT]
    known = cells[other], cells[other + USED], cells[other + SPENT]
    if known[0] == period or before[0] > known[0]:
        cells[other], cells[other + USED], cells[other + SPENT] = before
    cells[window], cells[window + USED], cells[window + SPENT] = known if known[0] == period else fresh


def _add_to_period(cells: Cells, window: int, period: int, tokens: float, cost: float) -> None:
    """To what was used in a period, or from it; one that is forgotten stays so."""
    known = _find_period(cells, window, period)
    if known is None:
        return
    if tokens:
        used = cells[known + USED] + tokens
        cells[known + USED] = used if used > 0 else 0.0
    if cost:
        spent = cells[known + SPENT] + cost
        cells[known + SPENT] = spent if spent > 0 else 0.0


class BucketState(msgspec.Struct, frozen=True, gc=False):
    """How a minute's limit stands: its size, what is left of it, and the seconds until all of it is there again."""

    limit: int
    remaining: int
    reset: float


def bucket_state(limit: int, full: float, now: float) -> BucketState:
    """Of a bucket that is full at a moment."""
    behind = full - now
    if behind <= 0:
        return BucketState(limit, limit, 0.0)
    left = int(limit * (1 - behind / _MINUTE) + _ROUNDING)
    return BucketState(limit, left if left > 0 else 0, behind)
