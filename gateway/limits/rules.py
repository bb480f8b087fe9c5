"""The decisions about limits: from what a holder has used, what is asked for, and the time, to what it has used then.

Pure. The rules: what is asked for is taken from every limit or from none; what is not used is given back to where it was
taken, as far as it is still missing there; a holder never gets more than its limits, whatever the clock does.

A minute's limit is a bucket that holds the limit and is filled evenly, so in ``t`` seconds no more than ``limit * (1 + t / 60)``
pass, and the turn of a minute means nothing. Of a bucket it is kept when it is full again, in seconds of a clock
that never goes back; it may lie further ahead than a minute, when more was used than had been reserved. Days and
months are the calendar's, in UTC; the one before is remembered, so a clock that is set back finds its counts again.

What time has filled up again must not be given back once more, or more would pass than is promised. A bucket is filled up in the
order in which it was taken from: what a request has reserved is missing until the moment at which the bucket was to be full with
it, or earlier by as much as others have given back since. So a bucket also counts what it was given back, and a request remembers
both as one sum, the ``end`` of what it has reserved. All that was given back since may have lain behind it in the order: then less
is given back than could be, never more.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from gateway.state import Limits

_MINUTE = 60.0
_DAY = 86400
_EPOCH = date(1970, 1, 1).toordinal()
_ROUNDING = 1e-6
"""Seconds that floating-point numbers may be off."""


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a request takes or has used. ``slots`` are places among those that are served at once."""

    requests: int = 0
    slots: int = 0
    tokens: int = 0
    cost: float = 0.0


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A point in time: ``now`` by a clock that never goes back, ``wall`` in seconds since the epoch."""

    now: float
    wall: float

    @property
    def day(self) -> int:
        """Days since the epoch."""
        return int(self.wall // _DAY)

    @property
    def month(self) -> int:
        """Months since the year 0."""
        return month_of(self.day)


@lru_cache(maxsize=64)
def month_of(day: int) -> int:
    """The month, since the year 0, of a day since the epoch."""
    found = date.fromordinal(_EPOCH + day)
    return found.year * 12 + found.month - 1


class Window(NamedTuple):
    """What was used in a period of the calendar, and in the latest other one that was looked at."""

    period: float = 0
    tokens: float = 0
    cost: float = 0
    other: float = 0
    other_tokens: float = 0
    other_cost: float = 0

    def turned(self, period: int) -> Window:
        """With this period as the present one."""
        if period == self.period:
            return self
        if period == self.other:
            return Window(*self[3:], *self[:3])
        return Window(period, 0, 0, *(self[:3] if self.period > self.other else self[3:]))

    def plus(self, period: float, tokens: float, cost: float) -> Window:
        """With so much more, or less, in a period; one that is forgotten stays so."""
        present, used, spent, other, other_used, other_spent = self
        if period == present:  # ``max`` and ``_replace`` would take four times as long, for each request
            used, spent = used + tokens, spent + cost
            return Window(present, used if used > 0 else 0, spent if spent > 0 else 0, other, other_used, other_spent)
        if period == other:
            other_used, other_spent = other_used + tokens, other_spent + cost
            return Window(present, used, spent, other, other_used if other_used > 0 else 0, other_spent if other_spent > 0 else 0)
        return self


class Meter(msgspec.Struct, frozen=True, gc=False):
    """What a holder has used. ``requests`` and ``tokens``: when those buckets are full again; ``…_back``: seconds that were ever given
    back to them."""

    requests: float = 0.0
    tokens: float = 0.0
    requests_back: float = 0.0
    tokens_back: float = 0.0
    day: Window = Window()
    month: Window = Window()
    in_flight: float = 0


class Refused(NamedTuple):
    """A limit that is reached: its name in the configuration, its size, and the seconds after which this would be admitted; None: nobody
    can know."""

    reason: str
    limit: float
    wait: float | None


QUOTAS = frozenset({"tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"})
"""The limits that last longer than one would wait for."""


def refused(limits: Limits, meter: Meter, ask: Ask, at: Moment) -> Refused | None:
    """The limit that stands longest in the way of a request; None if it is to be admitted."""
    if limits.concurrent is not None and ask.slots and meter.in_flight + ask.slots > limits.concurrent:
        return Refused("concurrent", limits.concurrent, None)
    worst: Refused | None = None
    if limits.requests_per_minute is not None and ask.requests:
        wait = _wait(meter.requests - at.now, limits.requests_per_minute, ask.requests)
        if wait:
            worst = Refused("requests_per_minute", limits.requests_per_minute, wait)
    if limits.tokens_per_minute is not None and ask.tokens:
        wait = _wait(meter.tokens - at.now, limits.tokens_per_minute, ask.tokens)
        if wait and (worst is None or wait > (worst.wait or 0)):
            worst = Refused("tokens_per_minute", limits.tokens_per_minute, wait)
    if limits.calendar:
        for each in _quotas(limits, meter, ask, at):
            if each is not None and (worst is None or outlasts(each, worst)):
                worst = each
    return worst


def outlasts(one: Refused, other: Refused) -> bool:
    """Whether a refusal is to be told rather than another: nobody can know its end, or it lasts longer."""
    return other.wait is not None and (one.wait is None or one.wait > other.wait)


def _wait(behind: float, limit: float, amount: float) -> float:
    """Seconds until a bucket that is full in ``behind`` seconds holds an amount, or is full where the amount is more than all of it."""
    wait = behind - _MINUTE * (1 - amount / limit) if amount < limit else behind
    return wait if wait > _ROUNDING else 0.0


def _quotas(limits: Limits, meter: Meter, ask: Ask, at: Moment) -> Iterable[Refused | None]:
    day, left = meter.day.turned(at.day), _DAY - at.wall % _DAY
    yield _quota("tokens_per_day", limits.tokens_per_day, day.tokens, ask.tokens, left)
    yield _quota("cost_per_day", limits.cost_per_day, day.cost, ask.cost, left)
    month, left = meter.month.turned(at.month), _left_of_month(at.wall)
    yield _quota("tokens_per_month", limits.tokens_per_month, month.tokens, ask.tokens, left)
    yield _quota("cost_per_month", limits.cost_per_month, month.cost, ask.cost, left)


def _quota(reason: str, limit: float | None, used: float, amount: float, left: float) -> Refused | None:
    return None if _holds(limit, used, amount) else Refused(reason, limit or 0, left)


def _holds(limit: float | None, used: float, amount: float) -> bool:
    """Whether a day or a month has room for an amount, or for all of the limit where it is more than that."""
    return limit is None or not amount or used + (amount if amount < limit else limit) <= limit


def _left_of_month(wall: float) -> float:
    now = datetime.fromtimestamp(wall, UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return ((first + timedelta(days=32)).replace(day=1) - now).total_seconds()


def admitted(limits: Limits, meter: Meter, ask: Ask, at: Moment) -> tuple[Meter, Refused | None]:
    """The meter with what was asked for taken from it; as it was, with the reason, if that can't be."""
    now, requests, tokens, in_flight = at.now, meter.requests, meter.tokens, meter.in_flight + ask.slots
    if ask.requests:
        requests = (requests if requests > now else now) + ask.requests * limits.request_seconds
    if ask.tokens:
        seconds = ask.tokens * limits.token_seconds
        tokens = (tokens if tokens > now else now) + (seconds if seconds < _MINUTE else _MINUTE)
    is_clear = requests - now <= _MINUTE and tokens - now <= _MINUTE and (limits.concurrent is None or in_flight <= limits.concurrent)
    day, month = meter.day, meter.month
    if limits.calendar and (ask.tokens or ask.cost):
        day, month = day.turned(at.day), month.turned(at.month)
        is_clear = is_clear and _have_room(limits, day, month, ask)
        day, month = _reserved_of_day(limits, day, ask), _reserved_of_month(limits, month, ask)
    if not is_clear:
        refusal = refused(limits, meter, ask, at)
        if refusal is not None:
            return meter, refusal
    return Meter(requests, tokens, meter.requests_back, meter.tokens_back, day, month, in_flight), None


def _have_room(limits: Limits, day: Window, month: Window, ask: Ask) -> bool:
    tokens, cost = ask.tokens, ask.cost
    of_tokens = _holds(limits.tokens_per_day, day.tokens, tokens) and _holds(limits.tokens_per_month, month.tokens, tokens)
    return of_tokens and (not cost or (_holds(limits.cost_per_day, day.cost, cost) and _holds(limits.cost_per_month, month.cost, cost)))


def settled(
    limits: Limits, meter: Meter, reserved: Ask, used: Ask, requests_end: float, tokens_end: float, now: float, then: Moment
) -> Meter:
    """The meter after a request that was admitted at a moment: what it used in the place of what was reserved for it.

    ``…_end``: until when what it has reserved of requests and of tokens is missing, with what was given back before.
    """
    of_requests, of_tokens = owed(limits, reserved, used)
    requests, requests_back, tokens, tokens_back = meter.requests, meter.requests_back, meter.tokens, meter.tokens_back
    if of_requests:
        requests, requests_back = _filled(requests, requests_back, of_requests, requests_end, now)
    if of_tokens:
        tokens, tokens_back = _filled(tokens, tokens_back, of_tokens, tokens_end, now)
    in_flight = meter.in_flight + used.slots - reserved.slots
    if not limits.calendar:
        return Meter(requests, tokens, requests_back, tokens_back, meter.day, meter.month, in_flight)
    day_tokens, day_cost, month_tokens, month_cost = owed_of_calendar(limits, reserved, used)
    day, month = meter.day.plus(then.day, day_tokens, day_cost), meter.month.plus(then.month, month_tokens, month_cost)
    return Meter(requests, tokens, requests_back, tokens_back, day, month, in_flight)


def owed(limits: Limits, reserved: Ask, used: Ask) -> tuple[float, float]:
    """What is taken from the buckets of requests and tokens, or is to be given back to them, in seconds, when a request is settled."""
    requests, in_advance = (used.requests - reserved.requests) * limits.request_seconds, reserved.tokens * limits.token_seconds
    return requests, used.tokens * limits.token_seconds - (in_advance if in_advance < _MINUTE else _MINUTE)


def owed_of_calendar(limits: Limits, reserved: Ask, used: Ask) -> tuple[float, float, float, float]:
    """What is added then to the tokens and the cost of a day, and to those of a month."""
    return (
        used.tokens - _at_most(reserved.tokens, limits.tokens_per_day),
        used.cost - _at_most(reserved.cost, limits.cost_per_day),
        used.tokens - _at_most(reserved.tokens, limits.tokens_per_month),
        used.cost - _at_most(reserved.cost, limits.cost_per_month),
    )


def _reserved_of_day(limits: Limits, day: Window, ask: Ask) -> Window:
    return day.plus(day.period, _at_most(ask.tokens, limits.tokens_per_day), _at_most(ask.cost, limits.cost_per_day))


def _reserved_of_month(limits: Limits, month: Window, ask: Ask) -> Window:
    return month.plus(month.period, _at_most(ask.tokens, limits.tokens_per_month), _at_most(ask.cost, limits.cost_per_month))


def _at_most(amount: float, limit: float | None) -> float:
    """More than all of a limit is never taken in advance, or it could never be had; of a bucket, no more than a minute."""
    return 0 if limit is None else amount if amount < limit else limit


def _filled(full: float, back: float, seconds: float, end: float, now: float) -> tuple[float, float]:
    """When a bucket is full again, and what was ever given back to it, after more was taken; or after some of what was reserved until
    ``end`` was given back, which is no more than what time has not filled up since."""
    if seconds > 0:
        return (full if full > now else now) + seconds, back
    missing = end - back - now
    given = missing if missing < -seconds else -seconds
    return (full - given, back + given) if given > 0 else (full, back)


class Standing(msgspec.Struct, frozen=True, gc=False):
    """How a minute's limit stands: its size, what is left of it, and the seconds until all of it is there again."""

    limit: int
    remaining: int
    reset: float


def standing(limit: int, full: float, now: float) -> Standing:
    """Of a bucket that is full at a moment."""
    behind = full - now
    if behind <= 0:
        return Standing(limit, limit, 0.0)
    left = int(limit * (1 - behind / _MINUTE) + _ROUNDING)
    return Standing(limit, left if left > 0 else 0, behind)
