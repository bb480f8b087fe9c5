"""The decisions about limits: from what a holder has used, what is asked for, and the time, to what it has used then.

Pure. The rules: what is asked for is taken from every limit or from none; what is not used is given back to where it was
taken; a holder never gets more than its limits, whatever the clock does.

A minute's limit is a bucket that holds the limit and is filled evenly, so in ``t`` seconds no more than ``limit * (1 + t / 60)``
pass, and the turn of a minute means nothing. Of a bucket one number is kept: when it is full again, in seconds of a clock
that never goes back; it may lie further ahead than a minute, when more was used than had been reserved. Days and
months are the calendar's, in UTC; the one before is remembered, so a clock that is set back finds its counts again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from gateway.state import Limits

_MINUTE = 60.0
_DAY = 86400
_EPOCH = date(1970, 1, 1).toordinal()
_ROUNDING = 1e-6
"""Seconds that floating-point numbers may be off."""


class Ask(NamedTuple):
    """What a request takes or has used. ``slots`` are places among those that are served at once."""

    requests: int = 0
    slots: int = 0
    tokens: int = 0
    cost: float = 0.0


class Moment(NamedTuple):
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


def month_of(day: int) -> int:
    """The month, since the year 0, of a day since the epoch."""
    found = date.fromordinal(_EPOCH + day)
    return found.year * 12 + found.month - 1


class Window(NamedTuple):
    """What was used in a period of the calendar, and in the one that was looked at before it."""

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
        return Window(period, 0, 0, *self[:3])

    def plus(self, period: float, tokens: float, cost: float) -> Window:
        """With so much more, or less, in a period; one that is forgotten stays so."""
        if period == self.period:
            return self._replace(tokens=max(self.tokens + tokens, 0), cost=max(self.cost + cost, 0))
        if period == self.other:
            return self._replace(other_tokens=max(self.other_tokens + tokens, 0), other_cost=max(self.other_cost + cost, 0))
        return self


class Meter(NamedTuple):
    """What a holder has used. ``requests`` and ``tokens``: when those buckets are full again."""

    requests: float = 0.0
    tokens: float = 0.0
    day: Window = Window()
    month: Window = Window()
    in_flight: int = 0


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
    if limits.tokens_per_day is not None or limits.cost_per_day is not None:
        day, left = meter.day.turned(at.day), _DAY - at.wall % _DAY
        yield _quota("tokens_per_day", limits.tokens_per_day, day.tokens, ask.tokens, left)
        yield _quota("cost_per_day", limits.cost_per_day, day.cost, ask.cost, left)
    if limits.tokens_per_month is not None or limits.cost_per_month is not None:
        month, left = meter.month.turned(at.month), _left_of_month(at.wall)
        yield _quota("tokens_per_month", limits.tokens_per_month, month.tokens, ask.tokens, left)
        yield _quota("cost_per_month", limits.cost_per_month, month.cost, ask.cost, left)


def _quota(reason: str, limit: float | None, used: float, amount: float, left: float) -> Refused | None:
    if limit is None or not amount or used + min(amount, limit) <= limit:
        return None
    return Refused(reason, limit, left)


def _left_of_month(wall: float) -> float:
    now = datetime.fromtimestamp(wall, UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return ((first + timedelta(days=32)).replace(day=1) - now).total_seconds()


class Change(NamedTuple):
    """What is added to a meter: seconds to its buckets, tokens and cost to its day and month. ``slots`` are given or taken."""

    requests: float = 0.0
    tokens: float = 0.0
    day_tokens: float = 0
    day_cost: float = 0.0
    month_tokens: float = 0
    month_cost: float = 0.0
    slots: int = 0


def taken(limits: Limits, ask: Ask) -> Change:
    """What admitting takes. More than all of a limit is never taken in advance, or it could never be had."""
    per_minute = limits.tokens_per_minute
    requests = 0.0 if limits.requests_per_minute is None else _MINUTE * ask.requests / limits.requests_per_minute
    tokens = 0.0 if per_minute is None else _MINUTE * ask.tokens / per_minute if ask.tokens < per_minute else _MINUTE
    if not limits.calendar:
        return Change(requests, tokens, slots=ask.slots)
    return Change(
        requests,
        tokens,
        _at_most(ask.tokens, limits.tokens_per_day),
        _at_most(ask.cost, limits.cost_per_day),
        _at_most(ask.tokens, limits.tokens_per_month),
        _at_most(ask.cost, limits.cost_per_month),
        ask.slots,
    )


def spent(limits: Limits, ask: Ask) -> Change:
    """What a request has used, all of it."""
    requests = 0.0 if limits.requests_per_minute is None else _MINUTE * ask.requests / limits.requests_per_minute
    tokens = 0.0 if limits.tokens_per_minute is None else _MINUTE * ask.tokens / limits.tokens_per_minute
    if not limits.calendar:
        return Change(requests, tokens, slots=ask.slots)
    return Change(requests, tokens, ask.tokens, ask.cost, ask.tokens, ask.cost, ask.slots)


def _at_most(amount: float, limit: float | None) -> float:
    return 0 if limit is None else min(amount, limit)


def difference(after: Change, before: Change) -> Change:
    """What is to be added where one thing was taken and another used."""
    return Change(
        after.requests - before.requests,
        after.tokens - before.tokens,
        after.day_tokens - before.day_tokens,
        after.day_cost - before.day_cost,
        after.month_tokens - before.month_tokens,
        after.month_cost - before.month_cost,
        after.slots - before.slots,
    )


def changed(meter: Meter, change: Change, now: float, day: int, month: int) -> Meter:
    """A meter after a change that belongs to this day and month."""
    counts = change[2:6] != _NOTHING
    return Meter(
        _filled(meter.requests, change.requests, now),
        _filled(meter.tokens, change.tokens, now),
        meter.day.plus(day, change.day_tokens, change.day_cost) if counts else meter.day,
        meter.month.plus(month, change.month_tokens, change.month_cost) if counts else meter.month,
        meter.in_flight + change.slots,
    )


_NOTHING = (0, 0, 0, 0)


def _filled(full: float, seconds: float, now: float) -> float:
    """When a bucket is full again from which more was taken, or to which some was given back."""
    return (full if full > now else now) + seconds if seconds > 0 else full + seconds


def admitted(limits: Limits, meter: Meter, ask: Ask, at: Moment) -> tuple[Meter, Refused | None]:
    """The meter with what was asked for taken from it; as it was, with the reason, if that can't be."""
    refusal = refused(limits, meter, ask, at)
    if refusal is not None:
        return meter, refusal
    if not limits.calendar:
        return changed(meter, taken(limits, ask), at.now, 0, 0), None
    day, month = at.day, at.month
    turned = meter._replace(day=meter.day.turned(day), month=meter.month.turned(month))
    return changed(turned, taken(limits, ask), at.now, day, month), None


def settled(limits: Limits, meter: Meter, reserved: Ask, used: Ask, now: float, day: int, month: int) -> Meter:
    """The meter after a request that was admitted on this day in this month."""
    return changed(meter, difference(spent(limits, used), taken(limits, reserved)), now, day, month)


class Standing(NamedTuple):
    """How a minute's limit stands: its size, what is left of it, and the seconds until all of it is there again."""

    limit: int
    remaining: int
    reset: float


def standing(limit: int, full: float, now: float) -> Standing:
    """Of a bucket that is full at a moment."""
    behind = max(full - now, 0.0)
    return Standing(limit, max(int(limit * (1 - behind / _MINUTE) + _ROUNDING), 0), behind)
