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

    ``periods`` are its day since the epoch, its week since that of the epoch, and its month since the year 0, in the order of ``CALENDAR``;
    a None behind them is the period of any other window. ``period_ends`` are their ends in seconds since the epoch.
    """

    now: float
    wall: float
    periods: tuple[int, int, int, None]
    period_ends: tuple[int, int, int]

    @property
    def day(self) -> int:
        """The day since the epoch."""
        return self.periods[0]

    @property
    def month(self) -> int:
        """The month since the year 0."""
        return self.periods[2]


def moment(now: float, wall: float) -> Moment:
    """Make a Moment from the times of both clocks."""
    return Moment(now, wall, *_periods_of(wall // _DAY_SECONDS))


@lru_cache(maxsize=64)
def _periods_of(number: float) -> tuple[tuple[int, int, int, None], tuple[int, int, int]]:
    """Return the periods of a day since the epoch, and their ends."""
    day = int(number)
    week, month = (day + _MONDAY) // 7, month_of(day)
    period_ends = day + 1, (week + 1) * 7 - _MONDAY, _first_day_of(month + 1)
    return (day, week, month, None), (period_ends[0] * _DAY_SECONDS, period_ends[1] * _DAY_SECONDS, period_ends[2] * _DAY_SECONDS)


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


class Window(NamedTuple):
    """A window and its budgets.

    ``name`` is ``day``, ``week``, ``month``, ``session``, or the length of a rolling window such as ``7d``. ``slice_seconds`` is 0 unless
    the window rolls. ``tokens`` and ``cost`` are the limits, infinity for none. ``tokens_ahead`` and ``cost_ahead`` are the maximum that
    one request reserves: 0 without any budget, and never more than the limit, or a large request could never pass.
    """

    name: str
    slice_seconds: float
    budgets: tuple[NamedBudget, ...]
    tokens: float
    cost: float
    tokens_ahead: float
    cost_ahead: float
    number: int = 0
    """The number of the counted session; 0: no session is counted."""


PlacedWindow = tuple[Window, int]
"""A window, and the offset of its first cell."""
FlatWindow = tuple[PlacedWindow, int, int, float, float, float, float]
"""A window as ``rules.admit`` reads it: the index of its period in ``Moment.periods``, the offset of its first cell, and the window's
``tokens``, ``cost``, ``tokens_ahead`` and ``cost_ahead``."""


def flattened(placed: PlacedWindow) -> FlatWindow:
    """Return a window as a plain tuple."""
    window, offset = placed
    calendar = CALENDAR.index(window.name) if window.name in CALENDAR else len(CALENDAR)
    return placed, calendar, offset, window.tokens, window.cost, window.tokens_ahead, window.cost_ahead


@lru_cache(maxsize=1024)
def windows_of(limits: Limits) -> tuple[Window, ...]:
    """Return the windows of these limits that have budgets."""
    budgets = {name: [*_named(name, getattr(limits, f"tokens_per_{name}"), getattr(limits, f"cost_per_{name}"))] for name in CALENDAR}
    seconds: dict[str, float] = {}
    for each in limits.budgets:
        seconds[each.window] = each.seconds
        budgets.setdefault(each.window, []).extend(_named(each.window, each.tokens, each.cost, each.soft))
    return tuple(_window(name, seconds.get(name, 0.0), tuple(found)) for name, found in budgets.items() if found)


def session_window(budget: Budget, number: int) -> Window:
    """Return the window of a session with this number."""
    return _window("session", 0.0, tuple(_named("session", budget.tokens, budget.cost)))._replace(number=number)


def _named(window: str, tokens: float | None, cost: float | None, soft: bool = False) -> Iterator[NamedBudget]:
    if tokens is not None:
        yield NamedBudget(f"tokens_per_{window}", tokens, False, soft)
    if cost is not None:
        yield NamedBudget(f"cost_per_{window}", cost, True, soft)


def _window(name: str, seconds: float, budgets: tuple[NamedBudget, ...]) -> Window:
    tokens, cost = (_smallest(budgets, is_cost) for is_cost in (False, True))
    has_tokens, has_cost = (any(each.is_cost is is_cost for each in budgets) for is_cost in (False, True))
    return Window(name, seconds / SLICES, budgets, tokens, cost, tokens if has_tokens else 0.0, cost if has_cost else 0.0)


def _smallest(budgets: Sequence[NamedBudget], is_cost: bool) -> float:
    return min((each.limit for each in budgets if each.is_cost is is_cost and not each.soft), default=math.inf)


# Periods and slices


def period_of(window: Window, at: Moment) -> int:
    """Return the number of the period, or of the slice of a rolling window, to which a moment belongs."""
    if window.slice_seconds:
        return int(at.wall // window.slice_seconds)
    name = window.name
    if name == "session":
        return window.number
    day, week, month, _ = at.periods
    return day if name == "day" else week if name == "week" else month


def counted_periods(window: Window, at: Moment) -> range:
    """Return the numbers of the periods, or of the slices of a rolling window, that count at a moment."""
    last = period_of(window, at)
    return range(last - SLICES if window.slice_seconds else last, last + 1)


def counted_starts(window: Window, at: Moment) -> list[float]:
    """Return the starts of the periods or slices that count at a moment, in seconds since the epoch."""
    if window.slice_seconds:
        return [number * window.slice_seconds for number in counted_periods(window, at)]
    if window.name == "month":
        return [_first_day_of(at.month) * _DAY_SECONDS]
    return [(at.day if window.name == "day" else period_of(window, at) * 7 - _MONDAY) * _DAY_SECONDS]


def used_in(window: Window, cells: Cells, offset: int, at: Moment) -> tuple[float, float]:
    """Return the tokens and the cost that count at a moment."""
    period = period_of(window, at)
    if not window.slice_seconds:
        known = _find_period(cells, offset, period)
        return (0.0, 0.0) if known is None else (cells[known + USED], cells[known + SPENT])
    tokens = cost = 0.0
    for _, start in _counted_slices(cells, offset, period):
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


class ExceededBudget(NamedTuple):
    """A budget without enough capacity. ``wait``: the seconds until the request fits; None: never."""

    name: str
    limit: float
    wait: float | None
    left: float
    requested: float


def exceeded(placed: PlacedWindow, is_cost: bool, used: float, total: float, amount: float, cells: Cells, at: Moment) -> ExceededBudget:
    """Return the exceeded budget of a window. ``used`` counts now, ``total`` with what a request for this amount would reserve."""
    window, offset = placed
    limit = window.cost if is_cost else window.tokens
    wait = _seconds_until_free(window, cells, offset, at, SPENT if is_cost else USED, total - limit)
    return exceeded_budget(window, is_cost, wait, limit - used, amount)


def exceeded_budget(window: Window, is_cost: bool, wait: float, left: float, amount: float) -> ExceededBudget:
    """Return the exceeded budget of tokens or of cost of a window, for a request with this amount."""
    limit, kind = (window.cost, "cost") if is_cost else (window.tokens, "tokens")
    return ExceededBudget(f"{kind}_per_{window.name}", limit, None if window.name == "session" else wait, left, amount)


def _seconds_until_free(window: Window, cells: Cells, offset: int, at: Moment, column: int, missing: float) -> float:
    """Return the seconds until a window has lost at least a missing amount."""
    if not window.slice_seconds:
        return _seconds_left(window.name, at)
    last = period_of(window, at)
    for number, start in sorted(_counted_slices(cells, offset, last)):
        if missing <= 0:
            break
        missing -= cells[start + column]
        last = number
    return (last + SLICES + 1) * window.slice_seconds - at.wall


def _seconds_left(period: str, at: Moment) -> float:
    """Return the seconds until the day, week or month ends. A session has no known end."""
    return at.period_ends[CALENDAR.index(period)] - at.wall if period in CALENDAR else 0.0


def seconds_left_in_period(window: Window, wall: float) -> float:
    """Return the seconds until another period, or another slice, counts the requests than at ``wall`` seconds since the epoch."""
    return window.slice_seconds - wall % window.slice_seconds if window.slice_seconds else _seconds_left(window.name, moment(0.0, wall))


# Changes


def reserve(placed: PlacedWindow, cells: Cells, tokens: float, cost: float, at: Moment) -> None:
    """Add what a request reserves to a window."""
    window, offset = placed
    period = period_of(window, at)
    if window.number and cells[offset] != period:
        return  # another session has the entry now
    start = _start_slice(cells, offset, period) if window.slice_seconds else _start_period(cells, offset, period)
    cells[start + USED] += min(tokens, window.tokens_ahead)
    cells[start + SPENT] += min(cost, window.cost_ahead)


def settle(windows: Sequence[PlacedWindow], cells: Cells, reserved: tuple[float, float], used: tuple[float, float], then: Moment) -> None:
    """Replace the reserved tokens and cost by the used amounts, in the windows at the time of the reservation.

    A period or slice that is no longer remembered stays unchanged.
    """
    for window, offset in windows:
        known = _known_period(window, cells, offset, period_of(window, then))
        if known is not None:
            tokens, cost = settlement(window, reserved, used)
            total = cells[known + USED] + tokens
            cells[known + USED] = total if total > 0 else 0.0
            if cost:
                total = cells[known + SPENT] + cost
                cells[known + SPENT] = total if total > 0 else 0.0


def _known_period(window: Window, cells: Cells, offset: int, period: int) -> int | None:
    """Return the offset of a period or slice; None if it is not remembered."""
    if not window.slice_seconds:
        return _find_period(cells, offset, period)
    start = offset + period % (SLICES + 1) * _CELLS_OF_SLICE
    return start if cells[start] == period else None


def settlement(window: Window, reserved: tuple[float, float], used: tuple[float, float]) -> tuple[float, float]:
    """Return the amounts to add to the tokens and the cost of a window at settlement."""
    tokens, cost = reserved
    return (
        used[0] - (tokens if tokens < window.tokens_ahead else window.tokens_ahead),
        used[1] - (cost if cost < window.cost_ahead else window.cost_ahead),
    )


def _find_period(cells: Cells, window: int, period: int) -> int | None:
    """Return the offset of a period; None if it is neither of the two that are remembered."""
    if cells[window] == period:
        return window
    return window + _OTHER if cells[window + _OTHER] == period else None


def _start_period(cells: Cells, window: int, period: int) -> int:
    """Make a period the current period, and remember the later of the two other known periods. Returns its offset."""
    if cells[window] == period:
        return window
    other, fresh = window + _OTHER, (period, 0.0, 0.0)
    before = cells[window], cells[window + USED], cells[window + SPENT]
    known = cells[other], cells[other + USED], cells[other + SPENT]
    if known[0] == period or before[0] > known[0]:
        cells[other], cells[other + USED], cells[other + SPENT] = before
    cells[window], cells[window + USED], cells[window + SPENT] = known if known[0] == period else fresh
    return window


def add_earlier_use(window: Window, cells: Cells, offset: int, period: int, tokens: float, cost: float) -> None:
    """Add the use from before these cells counted to a period or slice. A slice that was replaced by a later slice is not restored."""
    if not window.slice_seconds:
        start = _start_period(cells, offset, period)
    elif cells[offset + period % (SLICES + 1) * _CELLS_OF_SLICE] > period:
        return
    else:
        start = _start_slice(cells, offset, period)
    cells[start + USED] += tokens
    cells[start + SPENT] += cost


def _start_slice(cells: Cells, ring: int, period: int) -> int:
    """Return the offset of a slice, emptied if it still holds an older slice."""
    start = ring + period % (SLICES + 1) * _CELLS_OF_SLICE
    if cells[start] != period:
        cells[start], cells[start + USED], cells[start + SPENT] = period, 0.0, 0.0
    return start


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


def budget_states(windows: Iterable[FlatWindow], cells: Cells, at: Moment) -> list[BudgetState]:
    """Return the state of each budget at a moment."""
    states: list[BudgetState] = []
    add, periods, period_ends, wall = states.append, at.periods, at.period_ends, at.wall
    for (window, _), calendar, start, _, _, _, _ in windows:
        if cells[start] == periods[calendar]:
            tokens, cost, reset = cells[start + USED], cells[start + SPENT], period_ends[calendar] - wall
        else:
            tokens, cost = used_in(window, cells, start, at)
            reset = seconds_until_unused(window, cells, start, at)
        for each in window.budgets:
            add(BudgetState(each, window.name, cost if each.is_cost else tokens, reset))
    return states


def states_of(window: Window, tokens: float, cost: float, reset: float) -> list[BudgetState]:
    """Return the state of each budget of a window with these counts."""
    return [BudgetState(each, window.name, cost if each.is_cost else tokens, reset) for each in window.budgets]


def seconds_until_unused(window: Window, cells: Cells, offset: int, at: Moment) -> float:
    """Return the seconds until no earlier use counts any more."""
    if not window.slice_seconds:
        return _seconds_left(window.name, at)
    used = (
        number for number, start in _counted_slices(cells, offset, period_of(window, at)) if cells[start + USED] or cells[start + SPENT]
    )
    last = max(used, default=None)
    return 0.0 if last is None else (last + SLICES + 1) * window.slice_seconds - at.wall
