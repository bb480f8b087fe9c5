"""Windows of budgets, checked against a plain list of what was counted, and against the calendar of Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import decision, windows
from gateway.limits.decision import SIZE, Amounts, Holder
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import (
    RING_CELLS,
    SLICES,
    SPENT,
    USED,
    ExceededLimit,
    Moment,
    Window,
    moment,
    period_of,
    session_window,
    windows_of,
)
from gateway.snapshot.snapshot import Budget, Limits

WEDNESDAY = datetime(2027, 6, 2, 12, tzinfo=UTC)
HOUR = 3600.0


def at(wall: float) -> Moment:
    return moment(wall, wall)


def only(limits: Limits) -> Window:
    """Return the only window."""
    (window,) = windows_of(limits)
    return window


def test_a_holder_is_counted_in_the_windows_that_have_budgets() -> None:
    assert windows_of(Limits(requests_per_minute=5)) == ()
    budgets = Budget("day", tokens=5, soft=True), Budget("2h", 7200, cost=1), Budget("7d", 7 * 86400, 5)
    assert [each.name for each in windows_of(Limits(cost_per_month=5, budgets=budgets))] == ["day", "month", "2h", "7d"]


@pytest.mark.parametrize("days", range(10))
def test_a_week_is_that_of_iso_8601(days: int) -> None:
    window, then, now = only(Limits(tokens_per_week=5)), WEDNESDAY, WEDNESDAY + timedelta(days)
    same = then.isocalendar()[:2] == now.isocalendar()[:2]
    assert (period_of(window, at(then.timestamp())) == period_of(window, at(now.timestamp()))) == same
    monday = (now + timedelta(7 - now.weekday())).replace(hour=0)
    assert windows.seconds_until_unused(window, [0.0] * 6, at(now.timestamp())) == (monday - now).total_seconds()


@dataclass
class Use:
    """Tokens that were counted at a time."""

    wall: float
    tokens: int


@dataclass
class Rolling:
    """A rolling window of a day, with a list of what it counts."""

    limit: int
    soft: bool = False
    cells: list[float] = field(default_factory=lambda: [0.0] * (RING_CELLS + SIZE))
    counted: list[Use] = field(default_factory=list)

    @property
    def holder(self) -> Holder:
        return Holder.placed("one", Limits(budgets=(Budget("1d", 86400, self.limit, soft=self.soft),)), RING_CELLS, {"1d": 0})

    @property
    def window(self) -> Window:
        (window,) = self.holder.windows
        return window

    def admit(self, wall: float, tokens: int) -> float | None:
        """Count tokens and return None, or return the seconds to wait."""
        refused = self._refusal(wall, tokens, self.cells)
        if refused is None:
            self.counted.append(Use(wall, min(tokens, self.limit)))
            return None
        assert refused.wait is not None
        return refused.wait

    def fits(self, wall: float, tokens: int) -> bool:
        return self._refusal(wall, tokens, list(self.cells)) is None

    def _refusal(self, wall: float, tokens: int, cells: list[float]) -> ExceededLimit | None:
        refused = decision.admit([(self.holder, Amounts(tokens=tokens))], cells, at(wall), {})
        return None if refused is None else refused[1]

    def within(self, wall: float, seconds: float) -> int:
        return sum(each.tokens for each in self.counted if wall - seconds < each.wall <= wall)


@given(st.lists(st.tuples(st.floats(0.0, 20 * HOUR), st.integers(1, 120), st.integers(0, 150)), max_size=30))
def test_a_rolling_window_never_lets_more_than_its_budget_pass(steps: list[tuple[float, int, int]]) -> None:
    """Each step waits, reserves tokens, and settles them as used. Capacity returns up to one slice late."""
    rolling, wall = Rolling(100), WEDNESDAY.timestamp()
    for wait, tokens, used in steps:
        wall += wait
        before, seconds = list(rolling.cells), rolling.admit(wall, tokens)
        beyond = sum(max(each.tokens - tokens, 0) for each in rolling.counted)
        assert rolling.within(wall, 24 * HOUR) <= 100 + beyond
        if seconds is None:
            windows.settle(rolling.window, rolling.cells, (tokens, 0), (min(used, tokens), 0), at(wall))
            rolling.counted[-1].tokens = min(used, tokens, 100)
            continue
        assert rolling.cells == before, "a refusal changes nothing"
        assert rolling.within(wall, 25 * HOUR) + min(tokens, 100) > 100, "refused only if a slice more is used up"
        assert rolling.fits(wall + seconds + 0.01, tokens)
        assert not rolling.fits(wall + seconds - 1, tokens)


def test_a_rolling_window_shows_what_it_counts() -> None:
    rolling, wall = Rolling(100), WEDNESDAY.timestamp() + 60
    assert rolling.admit(wall, 30) is None and rolling.admit(wall + 10 * HOUR, 50) is None
    (state,) = windows.budget_states([rolling.window], rolling.cells, at(wall + 10 * HOUR))
    assert (state.budget.name, state.used, state.remaining, state.share) == ("tokens_per_1d", 80, 20, 0.8)
    assert state.reset == (SLICES + 1) * HOUR - 60, "the slice of the last use stays for a whole window behind its end"
    (state,) = windows.budget_states([rolling.window], rolling.cells, at(wall + 25 * HOUR))
    assert (state.used, state.remaining) == (50, 50)


def test_a_clock_that_is_set_back_finds_what_a_rolling_window_has_counted() -> None:
    rolling, wall = Rolling(100), WEDNESDAY.timestamp()
    assert rolling.admit(wall + 5 * HOUR, 100) is None
    assert rolling.admit(wall, 1) is not None


def test_a_settlement_of_a_forgotten_slice_changes_nothing() -> None:
    rolling, wall = Rolling(100), WEDNESDAY.timestamp()
    assert rolling.admit(wall, 40) is None and rolling.admit(wall + 25 * HOUR, 40) is None
    windows.settle(rolling.window, rolling.cells, (40, 0), (0, 0), at(wall))
    assert windows.used_in(rolling.window, rolling.cells, at(wall + 25 * HOUR)) == (40, 0)


def test_earlier_use_is_added_to_the_slices_that_still_count() -> None:
    """Add it to an empty slice, to a slice in use, and to a slice that a later slice has replaced."""
    rolling, wall = Rolling(100), WEDNESDAY.timestamp()
    assert rolling.admit(wall, 40) is None
    window, now = rolling.window, period_of(rolling.window, at(wall))
    for period in (now, now - 1, now - SLICES - 1):
        windows.add_earlier_use(window, rolling.cells, period, 7, 0)
    assert windows.used_in(window, rolling.cells, at(wall)) == (54, 0)


def test_a_soft_budget_refuses_nothing_and_is_counted() -> None:
    rolling = Rolling(10, soft=True)
    for _ in range(3):
        assert rolling.admit(1e9, 8) is None
    (state,) = windows.budget_states([rolling.window], rolling.cells, at(1e9))
    assert (state.used, state.remaining, state.share, state.budget.soft) == (24, 0, 2.4, True)


def test_a_request_above_a_budget_is_refused_once_something_is_spent() -> None:
    limits = Limits(budgets=(Budget("7d", 7 * 86400, tokens=100, cost=100),))
    now = at(WEDNESDAY.timestamp())
    for first, second in ((Amounts(1, 1, 10, 0), Amounts(1, 1, 200, 0)), (Amounts(1, 1, 0, 10), Amounts(1, 1, 0, 200))):
        buckets = Buckets.private()
        holder = buckets.holder("key a", limits)
        assert buckets.reserve([(holder, first)], now, {}) is None
        assert buckets.reserve([(holder, second)], now, {}) is not None
        unused = buckets.holder("key b", limits)
        assert buckets.reserve([(unused, second)], now, {}) is None, "a request may use a whole budget"


def test_the_seconds_that_are_left_in_a_period() -> None:
    noon = WEDNESDAY.timestamp()
    assert windows.seconds_left_in_period(only(Limits(tokens_per_day=1)), noon) == 12 * HOUR
    assert windows.seconds_left_in_period(only(Limits(tokens_per_week=1)), noon) == 4.5 * 24 * HOUR
    rolling = only(Limits(budgets=(Budget("24h", 86400, tokens=1),)))
    assert windows.seconds_left_in_period(rolling, noon + 600) == HOUR - 600


def test_what_is_left_is_that_of_the_tightest_hard_budget() -> None:
    day, week = only(Limits(tokens_per_day=100, cost_per_day=10)), only(Limits(tokens_per_week=500, cost_per_week=20))
    left, whole = windows.hard_capacity([(day, 40, 2), (week, 450, 15)])
    assert (left.tokens, left.cost) == (50, 5)
    assert (whole.tokens, whole.cost) == (100, 10)


def test_the_window_of_a_session_is_that_of_its_number() -> None:
    window = session_window(Budget("session", tokens=5), 3, 40)
    assert (window.name, window.number, window.start, window.tokens, window.cost) == ("session", 3, 40, 5, float("inf"))
    assert [budget.name for budget in window.budgets] == ["tokens_per_session"]


def test_a_period_starts_empty_and_is_found_again_with_what_it_counted() -> None:
    window, cells = only(Limits(tokens_per_day=100, cost_per_day=100)), memoryview(bytearray(8 * 64)).cast("d")
    today, tomorrow = at(WEDNESDAY.timestamp()), at((WEDNESDAY + timedelta(days=1)).timestamp())
    windows.reserve(window, cells, 3, 7, today)
    windows.reserve(window, cells, 0, 0, tomorrow)
    assert (cells[window.start + USED], cells[window.start + SPENT]) == (0, 0)
    windows.reserve(window, cells, 2, 4, today)
    assert (cells[window.start + USED], cells[window.start + SPENT]) == (5, 11)


def test_of_a_calendar_the_last_two_periods_are_remembered() -> None:
    window, cells = only(Limits(tokens_per_day=50_000, cost_per_day=100)), memoryview(bytearray(8 * 64)).cast("d")
    first, second, third = (at((WEDNESDAY + timedelta(days=days)).timestamp()) for days in range(3))

    def used() -> list[tuple[float, float]]:
        return [windows.used_in(window, cells, each) for each in (first, second, third)]

    windows.reserve(window, cells, 30_000, 7, first)  # more tokens than the number of a day
    windows.reserve(window, cells, 5, 11, second)
    assert used() == [(30_000, 7), (5, 11), (0, 0)]
    windows.reserve(window, cells, 1, 2, third)
    assert used() == [(0, 0), (5, 11), (1, 2)]
    for each in (second, third):  # the clock is set back, and forward again
        windows.reserve(window, cells, 0, 0, each)
        assert used() == [(0, 0), (5, 11), (1, 2)]
