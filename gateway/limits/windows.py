"""Count tokens and cost in windows of time, and report how much of each budget is used. Pure.

A window is a day, a week or a month of UTC, a rolling window such as the last ``7d``, or the whole of a session. The rules: a window
never lets more than its budget pass, and a clock that is set back finds its counts again. A refusal, a header and a metric all read
``budget_states`` or the counts behind it, so they show the same numbers. redis/admit.lua and redis/settle.lua count the same windows in
a Redis; a change here needs the same change there.

A window of the calendar has six cells: the current period with its tokens and cost, and the other period that was used last. A week starts
on Monday, as in ISO 8601. A rolling window is a ring of ``RING_CELLS`` cells: for each slice of time its number, its tokens and its cost. A
slice is the ``SLICES``-th part of the window. The current slice and the ``SLICES`` before it count, so at least the whole window counts:
capacity returns up to one slice late, and never early. A clock that is set forward overwrites the oldest slices; if it is set back again,
they are lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import lru_cache
from typing import NamedTuple

import msgspec

from gateway.snapshot.snapshot import CALENDAR, Budget, Limits
from upstream.cells import Cells

USED, SPENT = 1, 2
"""After a period or a slice: its tokens and its cost."""
SLICES = 24
RING_CELLS = 3 * (SLICES + 1)

_OTHER = 3
"""After the current period of a window: the other period that was used last."""
_CELLS_OF_SLICE = 3
_DAY_SECONDS = 86400
_EPOCH = date(1970, 1, 1).toordinal()
_MONDAY = 3
"""Days from the Monday before the epoch, which was a Thursday, to the epoch."""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A point in time. ``now`` is monotonic; ``wall`` is in seconds since the epoch.

    ``periods`` are its day since the epoch, its week since the week of the epoch, and its month since the year 0, in the order of
    ``CALENDAR``. The None after them is the period of any other window. ``period_ends`` are their ends in seconds since the epoch.
    """

    now: float
    wall: float
    periods: tuple[int, int, int, None]
    period_ends: tuple[int, int, int]


def moment(now: float, wall: float) -> Moment:
    """Make a Moment from the times of both clocks."""
    return Moment(now, wall, *_periods_of(wall // _DAY_SECONDS))


@lru_cache(maxsize=64)
def _periods_of(number: float) -> tuple[tuple[int, int, int, None], tuple[int, int, int]]:
    """Return the periods of a day since the epoch, and their ends."""
    day = int(number)
    week, month = (day + _MONDAY) // 7, month_of(day)
    return (day, week, month, None), _starts_of(day + 1, week + 1, month + 1)


def _starts_of(day: int, week: int, month: int) -> tuple[int, int, int]:
    """Return the starts of a day, a week and a month, in seconds since the epoch."""
    return day * _DAY_SECONDS, (week * 7 - _MONDAY) * _DAY_SECONDS, _first_day_of(month) * _DAY_SECONDS


def _first_day_of(month: int) -> int:
    """Return the first day, since the epoch, of a month since the year 0."""
    return date(month // 12, month % 12 + 1, 1).toordinal() - _EPOCH


def month_of(day: int) -> int:
    """Return the month since the year 0 for a day since the epoch. The Lua twin is in redis/calendar.lua."""
    found = date.fromordinal(_EPOCH + day)
    return found.year * 12 + found.month - 1


class NamedBudget(NamedTuple):
    """A budget of a window, of tokens or of cost. ``name`` is its name in refusals and metrics. A ``soft`` budget only warns."""

    name: str
    limit: float
    is_cost: bool
    soft: bool


class Window(msgspec.Struct, frozen=True, gc=False):
    """A window and its budgets.

    ``name`` is ``day``, ``week``, ``month``, ``session``, or the length of a rolling window such as ``7d``. ``calendar`` is the index of
    its period in ``Moment.periods``. ``slice_seconds`` is 0 unless the window rolls. ``tokens`` and ``cost`` are the limits, infinity for
    none. ``tokens_ahead`` and ``cost_ahead`` are the maximum that one request reserves: 0 without any budget, and never more than the
    limit, or a large request could never pass. ``start`` is the offset of its first cell, once the window has cells. ``number`` is the
    number of the counted session; 0: no session is counted.
    """

    name: str
    calendar: int
    slice_seconds: float
    budgets: tuple[NamedBudget, ...]
    tokens: float
    cost: float
    tokens_ahead: float
    cost_ahead: float
    start: int = 0
    number: int = 0


@lru_cache(maxsize=1024)
def windows_of(limits: Limits) -> tuple[Window, ...]:
    """Return the windows of these limits that have budgets."""
    budgets = {name: [*_named(name, getattr(limits, f"tokens_per_{name}"), getattr(limits, f"cost_per_{name}"))] for name in CALENDAR}
    seconds: dict[str, float] = {}
    for each in limits.budgets:
        seconds[each.window] = each.seconds
        budgets.setdefault(each.window, []).extend(_named(each.window, each.tokens, each.cost, each.soft))
    return tuple(_window(name, seconds.get(name, 0.0), tuple(found)) for name, found in budgets.items() if found)


def session_window(budget: Budget, number: int, start: int = 0) -> Window:
    """Return the window of a session with this number, whose first cell is at ``start``."""
    window = _window("session", 0.0, tuple(_named("session", budget.tokens, budget.cost)))
    return msgspec.structs.replace(window, number=number, start=start)


def _named(window: str, tokens: float | None, cost: float | None, soft: bool = False) -> Iterator[NamedBudget]:
    if tokens is not None:
        yield NamedBudget(f"tokens_per_{window}", tokens, False, soft)
    if cost is not None:
        yield NamedBudget(f"cost_per_{window}", cost, True, soft)


def _window(name: str, seconds: float, budgets: tuple[NamedBudget, ...]) -> Window:
    tokens, cost = (_smallest(budgets, is_cost) for is_cost in (False, True))
    has_tokens, has_cost = (any(each.is_cost is is_cost for each in budgets) for is_cost in (False, True))
    calendar = CALENDAR.index(name) if name in CALENDAR else len(CALENDAR)
    return Window(name, calendar, seconds / SLICES, budgets, tokens, cost, tokens if has_tokens else 0.0, cost if has_cost else 0.0)


def _smallest(budgets: Sequence[NamedBudget], is_cost: bool) -> float:
    return min((each.limit for each in budgets if each.is_cost is is_cost and not each.soft), default=math.inf)


# Periods and slices


def period_of(window: Window, at: Moment) -> int:
    """Return the number of the period, or of the slice of a rolling window, to which a moment belongs."""
    if window.slice_seconds:
        return int(at.wall // window.slice_seconds)
    period = at.periods[window.calendar]
    return window.number if period is None else period


def counted_periods(window: Window, at: Moment) -> range:
    """Return the numbers of the periods, or of the slices of a rolling window, that count at a moment."""
    last = period_of(window, at)
    return range(last - SLICES if window.slice_seconds else last, last + 1)


def counted_starts(window: Window, at: Moment) -> list[float]:
    """Return the starts of the periods or slices that count at a moment, in seconds since the epoch."""
    if window.slice_seconds:
        return [number * window.slice_seconds for number in counted_periods(window, at)]
    return [_starts_of(*at.periods[:3])[window.calendar]]


def used_in(window: Window, cells: Cells, at: Moment) -> tuple[float, float]:
    """Return the tokens and the cost that count at a moment."""
    period = period_of(window, at)
    if not window.slice_seconds:
        known = _known_period(window, cells, period)
        return (0.0, 0.0) if known is None else (cells[known + USED], cells[known + SPENT])
    tokens = cost = 0.0
    for _, start in _counted_slices(cells, window.start, period):
        tokens += cells[start + USED]
        cost += cells[start + SPENT]
    return tokens, cost


def _counted_slices(cells: Cells, ring: int, period: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the offset of each slice that counts. Slices ahead of the clock count too: it was set back."""
    for start in range(ring, ring + RING_CELLS, _CELLS_OF_SLICE):
        number = int(cells[start])
        if number and -SLICES <= number - period <= SLICES:
            yield number, start


class Capacity(NamedTuple):
    """Tokens and cost: of each the smallest of several hard budgets. Infinite without a budget."""

    tokens: float
    cost: float


def hard_capacity(used: Iterable[tuple[Window, float, float]]) -> tuple[Capacity, Capacity]:
    """Return what is left of the hard budgets, and the whole budgets. ``used``: windows with the tokens and the cost that count."""
    tokens_left = cost_left = tokens = cost = math.inf
    for window, taken, spent in used:
        if window.tokens - taken < tokens_left:
            tokens_left = window.tokens - taken
        if window.tokens < tokens:
            tokens = window.tokens
        if window.cost - spent < cost_left:
            cost_left = window.cost - spent
        if window.cost < cost:
            cost = window.cost
    return Capacity(tokens_left, cost_left), Capacity(tokens, cost)


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


def exceeded(window: Window, is_cost: bool, used: float, total: float, amount: float, cells: Cells, at: Moment) -> ExceededLimit:
    """Return the exceeded budget of a window. ``used`` counts now, ``total`` with what a request for this amount would reserve."""
    limit = window.cost if is_cost else window.tokens
    wait = _seconds_until_free(window, cells, at, SPENT if is_cost else USED, total - limit)
    return exceeded_budget(window, is_cost, wait, limit - used, amount)


def exceeded_budget(window: Window, is_cost: bool, wait: float, left: float, amount: float) -> ExceededLimit:
    """Return the exceeded budget of tokens or of cost of a window, for a request with this amount."""
    limit, kind = (window.cost, "cost") if is_cost else (window.tokens, "tokens")
    return ExceededLimit(f"{kind}_per_{window.name}", limit, None if window.name == "session" else wait, left, amount)


def _seconds_until_free(window: Window, cells: Cells, at: Moment, column: int, missing: float) -> float:
    """Return the seconds until a window has lost at least a missing amount."""
    if not window.slice_seconds:
        return _seconds_left(window, at)
    last = period_of(window, at)
    for number, start in sorted(_counted_slices(cells, window.start, last)):
        if missing <= 0:
            break
        missing -= cells[start + column]
        last = number
    return (last + SLICES + 1) * window.slice_seconds - at.wall


def _seconds_left(window: Window, at: Moment) -> float:
    """Return the seconds until the day, week or month ends. A session has no known end."""
    return 0.0 if window.name == "session" else at.period_ends[window.calendar] - at.wall


def seconds_left_in_period(window: Window, wall: float) -> float:
    """Return the seconds until another period, or another slice, counts the requests than at ``wall`` seconds since the epoch."""
    return window.slice_seconds - wall % window.slice_seconds if window.slice_seconds else _seconds_left(window, moment(0.0, wall))


# Changes


def reserve(window: Window, cells: Cells, tokens: float, cost: float, at: Moment) -> None:
    """Add what a request reserves to a window."""
    period = period_of(window, at)
    if window.number and cells[window.start] != period:
        return  # another session has the entry now
    start = _start_period(window, cells, period)
    cells[start + USED] += min(tokens, window.tokens_ahead)
    cells[start + SPENT] += min(cost, window.cost_ahead)


def settle(window: Window, cells: Cells, reserved: tuple[float, float], used: tuple[float, float], then: Moment) -> None:
    """Replace the reserved tokens and cost by the used amounts, in a window at the time of the reservation.

    A period or slice that is no longer remembered stays unchanged.
    """
    known = _known_period(window, cells, period_of(window, then))
    if known is not None:
        tokens, cost = settlement(window, reserved, used)
        cells[known + USED] = max(cells[known + USED] + tokens, 0.0)
        cells[known + SPENT] = max(cells[known + SPENT] + cost, 0.0)


def _known_period(window: Window, cells: Cells, period: int) -> int | None:
    """Return the offset of a period or slice; None if it is not remembered: of the calendar, two are."""
    start = _cell_of_slice(window, period) if window.slice_seconds else window.start
    if cells[start] == period:
        return start
    return start + _OTHER if not window.slice_seconds and cells[start + _OTHER] == period else None


def settlement(window: Window, reserved: tuple[float, float], used: tuple[float, float]) -> tuple[float, float]:
    """Return the amounts to add to the tokens and the cost of a window at settlement."""
    tokens, cost = reserved
    return (
        used[0] - (tokens if tokens < window.tokens_ahead else window.tokens_ahead),
        used[1] - (cost if cost < window.cost_ahead else window.cost_ahead),
    )


def _start_period(window: Window, cells: Cells, period: int) -> int:
    """Make a period the current period, and remember the later of the two other known periods. Returns its offset.

    A rolling window has one place for a slice, which is emptied if it still holds an older slice.
    """
    start = _cell_of_slice(window, period) if window.slice_seconds else window.start
    before = cells[start], cells[start + USED], cells[start + SPENT]
    if before[0] == period:
        return start
    started: tuple[float, float, float] = period, 0.0, 0.0
    if not window.slice_seconds:
        other = start + _OTHER
        known = cells[other], cells[other + USED], cells[other + SPENT]
        if known[0] == period or before[0] > known[0]:
            cells[other], cells[other + USED], cells[other + SPENT] = before
        started = known if known[0] == period else started
    cells[start], cells[start + USED], cells[start + SPENT] = started
    return start


def add_earlier_use(window: Window, cells: Cells, period: int, tokens: float, cost: float) -> None:
    """Add the use from before these cells counted to a period or slice. A slice that was replaced by a later slice is not restored."""
    if window.slice_seconds and cells[_cell_of_slice(window, period)] > period:
        return
    start = _start_period(window, cells, period)
    cells[start + USED] += tokens
    cells[start + SPENT] += cost


def _cell_of_slice(window: Window, period: int) -> int:
    return window.start + period % (SLICES + 1) * _CELLS_OF_SLICE


# States


class BudgetState(msgspec.Struct, frozen=True, gc=False):
    """State of a budget: its use, reservations included, and the seconds until all of it is available again."""

    budget: NamedBudget
    window: str
    used: float
    reset: float

    @property
    def remaining(self) -> float:
        """The part of the budget that is left."""
        return max(self.budget.limit - self.used, 0.0)

    @property
    def share(self) -> float:
        """The used share, above 1 if a request has used more than it had reserved."""
        return self.used / self.budget.limit


def budget_states(windows: Iterable[Window], cells: Cells, at: Moment) -> list[BudgetState]:
    """Return the state of each budget at a moment."""
    states: list[BudgetState] = []
    add, periods, period_ends, wall = states.append, at.periods, at.period_ends, at.wall
    for window in windows:
        calendar, start = window.calendar, window.start
        if cells[start] == periods[calendar]:
            tokens, cost, reset = cells[start + USED], cells[start + SPENT], period_ends[calendar] - wall
        else:
            tokens, cost = used_in(window, cells, at)
            reset = seconds_until_unused(window, cells, at)
        for each in window.budgets:
            add(BudgetState(each, window.name, cost if each.is_cost else tokens, reset))
    return states


def states_of(window: Window, tokens: float, cost: float, reset: float) -> list[BudgetState]:
    """Return the state of each budget of a window with these counts."""
    return [BudgetState(each, window.name, cost if each.is_cost else tokens, reset) for each in window.budgets]


def seconds_until_unused(window: Window, cells: Cells, at: Moment) -> float:
    """Return the seconds until no earlier use counts any more."""
    if not window.slice_seconds:
        return _seconds_left(window, at)
    counted = _counted_slices(cells, window.start, period_of(window, at))
    last = max((number for number, start in counted if cells[start + USED] or cells[start + SPENT]), default=None)
    return 0.0 if last is None else (last + SLICES + 1) * window.slice_seconds - at.wall
