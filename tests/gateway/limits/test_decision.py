"""The decisions about limits, checked against a second count: the sum of all admitted requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gateway.limits import decision, windows
from gateway.limits.decision import (
    DAY,
    MONTH,
    REQUESTS,
    SIZE,
    TOKENS,
    WEEK,
    Amounts,
    BucketState,
    Holder,
    bucket_state,
)
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import SPENT, USED, ExceededLimit, Moment, moment, month_of
from gateway.snapshot.snapshot import Budget, Limits
from tests.support.examples import examples
from upstream.cells import Cells

LAST_DAY_OF_MAY = datetime(2027, 5, 31, 23, 30, tzinfo=UTC).timestamp()
AT = moment(1000.0, LAST_DAY_OF_MAY)
"""A Monday."""
WEEK_OF_AT = (AT.periods[0] + 3) // 7
REQUEST = Amounts(requests=1, slots=1)


class Copied(dict[int, float]):
    """Cells that read through to others, and change none of them."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def __missing__(self, index: int) -> float:
        return self._cells[index]


def later(at: Moment, seconds: float) -> Moment:
    return moment(at.now + seconds, at.wall + seconds)


def week(at: Moment) -> int:
    """Return the week, from the day: the epoch was a Thursday."""
    return (at.periods[0] + 3) // 7


class HolderBuckets:
    """The buckets of one holder without shared memory: their cells and the requests in flight."""

    def __init__(self, cells: Sequence[float] = (0.0,) * SIZE, in_flight: float = 0) -> None:
        self.cells = [*cells, in_flight]

    def admit(
        self, limits: Limits, requested: Amounts, at: Moment = AT, refilled_at: dict[int, float] | None = None
    ) -> ExceededLimit | None:
        wanted = [(Holder.placed("one", limits), requested)]
        refused = decision.admit(wanted, self.cells, at, {} if refilled_at is None else refilled_at)
        return None if refused is None else refused[1]

    def fill(self, limits: Limits, requested: Amounts, at: Moment = AT) -> tuple[int, ExceededLimit]:
        """Admit requests until one is refused; return the number of admitted requests and the refusal."""
        count = 0
        while (refused := self.admit(limits, requested, at)) is None:
            count += 1
        return count, refused


@pytest.mark.parametrize(
    ("limits", "requested", "times", "wait"),
    [
        (Limits(requests_per_minute=6), REQUEST, 6, 10),
        (Limits(tokens_per_minute=600), Amounts(tokens=100), 6, 10),
        (Limits(tokens_per_minute=600), Amounts(tokens=250), 2, 15),
        (Limits(tokens_per_minute=600), Amounts(tokens=5000), 1, 60),
        (Limits(tokens_per_day=600), Amounts(tokens=250), 2, 1800),
        (Limits(tokens_per_week=600), Amounts(tokens=200), 3, 6 * 86400 + 1800),
        (Limits(tokens_per_month=600), Amounts(tokens=600), 1, 1800),
        (Limits(cost_per_day=100), Amounts(tokens=1, cost=25), 4, 1800),
        (Limits(cost_per_week=100), Amounts(tokens=1, cost=50), 2, 6 * 86400 + 1800),
        (Limits(cost_per_month=100), Amounts(tokens=1, cost=30), 3, 1800),
        (Limits(concurrent=3), REQUEST, 3, None),
    ],
)
def test_a_limit_holds_and_reports_when_it_has_capacity(limits: Limits, requested: Amounts, times: int, wait: float | None) -> None:
    bucket = HolderBuckets()
    count, refused = bucket.fill(limits, requested)
    assert count == times
    assert refused.wait == (None if wait is None else pytest.approx(wait))
    if wait is not None:
        assert bucket.admit(limits, requested, later(AT, wait - 0.01)) is not None, "not a moment earlier"
        assert bucket.admit(limits, requested, later(AT, wait + 1e-6)) is None


def test_minute_boundaries_have_no_effect() -> None:
    limits, at, bucket = Limits(requests_per_minute=600), moment(59.999, LAST_DAY_OF_MAY), HolderBuckets()
    count, _ = bucket.fill(limits, REQUEST, at)
    more, _ = bucket.fill(limits, REQUEST, later(at, 0.25))
    assert (count, more) == (600, 2)


def test_the_longest_wait_is_reported() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=60, tokens_per_day=10)
    _, refused = HolderBuckets().fill(limits, Amounts(1, 1, 10))
    assert refused.reason == "tokens_per_day"
    _, refused = HolderBuckets().fill(Limits(requests_per_minute=60, tokens_per_minute=60), Amounts(1, 1, 60))
    assert refused.reason == "tokens_per_minute" and refused.wait == pytest.approx(60)


def test_tokens_used_beyond_the_estimate_are_paid_off() -> None:
    timeline = Timeline(Limits(tokens_per_minute=600))
    timeline.settle(Amounts(tokens=100), Amounts(tokens=1200), timeline.take(Amounts(tokens=100)))
    refused = timeline.buckets.admit(timeline.limits, Amounts(tokens=1))
    assert refused is not None and refused.wait == pytest.approx(60.1)


@dataclass
class Timeline:
    """Admissions by one bucket along a clock, and their number."""

    limits: Limits
    buckets: HolderBuckets = field(default_factory=HolderBuckets)
    at: Moment = AT
    passed: int = 0

    def take(self, requested: Amounts) -> dict[int, float]:
        """Admit a request and return when its amounts will be refilled."""
        end_times: dict[int, float] = {}
        assert self.buckets.admit(self.limits, requested, self.at, end_times) is None
        return end_times

    def fill(self, requested: Amounts) -> None:
        """Admit as many requests as the limits allow."""
        self.passed += self.buckets.fill(self.limits, requested, self.at)[0]

    def settle(self, requested: Amounts, used: Amounts, refilled_at: dict[int, float]) -> None:
        reserved = [(Holder.placed("one", self.limits), requested)]
        decision.settle(reserved, self.buckets.cells, used, refilled_at, self.at.now, AT)

    def wait(self, seconds: float) -> None:
        self.at = later(self.at, seconds)


def test_late_failures_do_not_release_capacity_twice() -> None:
    """Fail sixty requests after two minutes while other requests of the same key use all capacity."""
    timeline = Timeline(Limits(requests_per_minute=60))
    failing = [timeline.take(REQUEST) for _ in range(60)]
    timeline.wait(60)
    timeline.fill(REQUEST)
    for end_times in failing:
        timeline.settle(REQUEST, Amounts(), end_times)
        timeline.wait(1)
        timeline.fill(REQUEST)
    assert timeline.passed <= 60 * 2


def test_tokens_refilled_by_time_are_not_released_again() -> None:
    timeline = Timeline(Limits(tokens_per_minute=1000))
    end_times = timeline.take(Amounts(tokens=1000))
    timeline.wait(120)
    timeline.fill(Amounts(tokens=10))
    timeline.settle(Amounts(tokens=1000), Amounts(tokens=20), end_times)
    timeline.fill(Amounts(tokens=10))
    assert timeline.passed == 100


def test_a_reservation_whose_refill_moved_earlier_releases_less() -> None:
    """Reserve half a bucket twice. The first half is released at once, so the second is refilled half a minute earlier."""
    timeline, half = Timeline(Limits(tokens_per_minute=600)), Amounts(tokens=300)
    first, second = timeline.take(half), timeline.take(half)
    timeline.settle(half, Amounts(), first)
    timeline.wait(29)
    timeline.take(half)
    timeline.wait(1)
    timeline.settle(half, Amounts(), second)
    timeline.fill(Amounts(tokens=1))
    assert timeline.passed <= 600 * (1 + 1 / 60) - 300


@pytest.mark.parametrize(("after", "missing"), [(0, 31.2), (30, 1.2), (59, 0)])
def test_tokens_that_are_not_refilled_yet_are_released(after: float, missing: float) -> None:
    """Reserve half a bucket while half a minute is missing: a minute is missing then, of which up to 28.8 seconds are released."""
    timeline = Timeline(Limits(tokens_per_minute=100))
    timeline.fill(Amounts(tokens=50))
    timeline.wait(30)
    end_times = timeline.take(Amounts(tokens=50))
    timeline.wait(after)
    timeline.settle(Amounts(tokens=50), Amounts(tokens=2), end_times)
    assert timeline.buckets.cells[TOKENS] - timeline.at.now == pytest.approx(missing)


def test_bucket_state() -> None:
    timeline = Timeline(Limits(requests_per_minute=60))
    timeline.take(REQUEST)
    full = timeline.buckets.cells[REQUESTS]
    assert bucket_state(60, full, AT.now) == BucketState(60, 59, 1.0)
    assert bucket_state(60, full, AT.now + 1) == BucketState(60, 60, 0.0)
    assert bucket_state(60, AT.now + 90, AT.now) == BucketState(60, 0, 90.0)


def test_the_latest_other_day_is_remembered() -> None:
    """Set the clock a day forward, back, two forward and one back: the count of that day is still known."""
    limits, bucket, days = Limits(tokens_per_day=5), HolderBuckets(), [later(AT, day * 86400) for day in range(3)]
    assert bucket.admit(limits, Amounts(tokens=5), days[1]) is None
    assert [bucket.admit(limits, Amounts(tokens=1), days[day]) for day in (0, 2)] == [None, None]
    assert bucket.admit(limits, Amounts(tokens=1), days[1]) is not None


def test_months() -> None:
    days = [datetime(2027, month, 1, tzinfo=UTC) for month in range(1, 13)]
    assert [month_of(int(day.timestamp() // 86400)) for day in days] == [2027 * 12 + number for number in range(12)]


def some(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, most)


limits_of_all_kinds = st.builds(
    Limits,
    requests_per_minute=some(5),
    tokens_per_minute=some(100),
    tokens_per_day=some(200),
    tokens_per_week=some(250),
    tokens_per_month=some(300),
    cost_per_day=some(4),
    cost_per_week=some(5),
    cost_per_month=some(5),
    concurrent=some(3),
)
periods = st.tuples(st.integers(-1, 1), st.integers(0, 300), st.integers(0, 5))
bucket_cells = st.builds(
    lambda full, back, days, months, weeks: [
        *(AT.now + seconds for seconds in full),
        *back,
        *(AT.periods[0] + days[0][0], *days[0][1:], AT.periods[0] + days[1][0], *days[1][1:]),
        *(AT.periods[2] + months[0][0], *months[0][1:], AT.periods[2] + months[1][0], *months[1][1:]),
        *(WEEK_OF_AT + weeks[0][0], *weeks[0][1:], WEEK_OF_AT + weeks[1][0], *weeks[1][1:]),
    ],
    st.tuples(st.floats(-90, 90), st.floats(-90, 90)),
    st.tuples(st.floats(0, 90), st.floats(0, 90)),
    st.tuples(periods, periods),
    st.tuples(periods, periods),
    st.tuples(periods, periods),
)
amounts = st.builds(Amounts, st.integers(0, 1), st.integers(0, 1), st.integers(0, 250), st.integers(0, 4))


def exceeded_limits(limits: Limits, cells: list[float], flying: int, requested: Amounts) -> dict[str, tuple[float, float]]:
    """Return the exceeded limits by name: the seconds to wait, and what is left of tokens or cost. One by one, as documented."""
    found = {}
    if requested.slots and limits.concurrent is not None and flying + requested.slots > limits.concurrent:
        found["concurrent"] = inf, 0.0
    for reason, bucket, amount in (("requests_per_minute", REQUESTS, requested.requests), ("tokens_per_minute", TOKENS, requested.tokens)):
        limit = getattr(limits, reason)
        left = 0 if limit is None else limit * (1 - (cells[bucket] - AT.now) / 60)
        if limit and amount and min(amount, limit) > left + 1e-6:
            found[reason] = (min(amount, limit) - left) * 60 / limit, left if bucket == TOKENS else 0.0
    for name, window, period, end in zip(("day", "week", "month"), (DAY, WEEK, MONTH), AT.periods, AT.period_ends, strict=False):
        known = next((each for each in (window, window + 3) if cells[each] == period), None)
        for kind, column, amount in (("tokens", USED, requested.tokens), ("cost", SPENT, requested.cost)):
            limit, used = getattr(limits, f"{kind}_per_{name}"), 0.0 if known is None else cells[known + column]
            if limit and amount and used + min(amount, limit) > limit:
                found[f"{kind}_per_{name}"] = end - AT.wall, limit - used
    return found


@given(limits_of_all_kinds, bucket_cells, st.integers(0, 4), amounts)
def test_a_request_is_admitted_or_refused_and_a_refusal_changes_nothing(
    limits: Limits, cells: list[float], flying: int, requested: Amounts
) -> None:
    assert len(cells) == SIZE
    holder = Holder.placed("one", limits)
    cells = [*cells, flying]
    before, exceeded = list(cells), exceeded_limits(limits, cells, flying, requested)
    refused = decision.admit([(holder, requested)], cells, AT, {})
    assert (refused is None) == (not exceeded)
    if refused is not None:
        reason, limit, wait, left, amount = refused[1]
        assert refused[0] is holder and limit == getattr(limits, reason)
        assert (inf if wait is None else wait, left) == pytest.approx(exceeded[reason])
        assert exceeded[reason][0] == pytest.approx(max(each for each, _ in exceeded.values())), "the longest wait is reported"
        assert amount == (requested.cost if "cost" in reason else requested.tokens if "tokens" in reason else 0)
        assert cells == before


@given(limits_of_all_kinds, bucket_cells, amounts, amounts, st.floats(0, 90))
def test_buckets_and_windows_are_settled_by_the_amounts_that_a_store_gets(
    limits: Limits, cells: list[float], requested: Amounts, used: Amounts, after: float
) -> None:
    """``settle`` computes in one pass what ``settlement_of_buckets`` and ``windows.settlement`` compute for a store."""
    holder, now = Holder.placed("one", limits), AT.now + after
    end_times: dict[int, float] = {}
    cells = [*cells, 0.0]
    if decision.admit([(holder, requested)], cells, AT, end_times) is not None:
        return
    expected = list(cells)
    expected[SIZE] -= requested.slots
    for bucket, seconds in zip((REQUESTS, TOKENS), decision.settlement_of_buckets(limits, requested, used), strict=True):
        if seconds > 0:
            expected[bucket] = max(cells[bucket], now) + seconds
        elif (given := min(-seconds, end_times.get(bucket, 0.0) - cells[bucket + 2] - now)) > 0:
            expected[bucket], expected[bucket + 2] = cells[bucket] - given, cells[bucket + 2] + given
    for window in holder.windows:
        windows.settle(window, expected, (requested.tokens, requested.cost), (used.tokens, used.cost), AT)
    decision.settle([(holder, requested)], cells, used, end_times, now, AT)
    assert cells == pytest.approx(expected)


KEYS = Limits(
    requests_per_minute=5,
    tokens_per_minute=100,
    tokens_per_day=400,
    tokens_per_week=500,
    tokens_per_month=600,
    cost_per_day=10**9,
    cost_per_month=500,
    concurrent=3,
    budgets=(Budget("30d", 30 * 86400, tokens=700), Budget("day", tokens=100, soft=True)),
)
TEAM = Limits(
    requests_per_minute=7, tokens_per_minute=150, tokens_per_day=600, concurrent=4, budgets=(Budget("30d", 30 * 86400, tokens=1000),)
)


@dataclass
class Request:
    """An admitted request. ``used``: its tokens, after it has finished; ``counts``: it counts as a request."""

    key: str
    worker: int
    requested: Amounts
    then: Moment
    refilled_at: dict[int, float]
    used: int | None = None
    counts: bool = True
    is_open: bool = True

    def taken(self, limit: float) -> float:
        """Return the tokens it keeps of its reservation."""
        return min(self.requested.tokens, limit) if self.used is None else min(self.requested.tokens, limit, self.used)

    def counted(self, limit: float) -> float:
        """Return its tokens in a day or month."""
        return min(self.requested.tokens, limit) if self.used is None else self.used

    def beyond(self, limit: float) -> float:
        """Return the tokens it used beyond its reservation."""
        return 0 if self.used is None else max(self.used - min(self.requested.tokens, limit), 0)


class Limiting(RuleBasedStateMachine):
    """Requests of two keys of a team in two workers: they are settled, fail, or are lost with their worker.

    The wall clock moves forward and back over the end of a month.
    """

    requests = Bundle("requests")

    @initialize()
    def begin(self) -> None:
        self.control = Buckets.create("limits", 3)
        self.workers = [self._worker(1), self._worker(2)]
        self.team = self.control.holder("team", TEAM)
        self.keys = {name: self.control.holder(name, KEYS) for name in "ab"}
        self.at = AT
        self.newest = AT.periods[0]
        self.all: list[Request] = []

    def _worker(self, number: int) -> Buckets:
        return Buckets.inherited(os.dup(self.control.fd), number)

    def _cells(self, holder: Holder) -> list[float]:
        return list(self.control.cells[holder.offset : holder.offset + SIZE])

    def _refusal(self, holder: Holder, requested: Amounts, at: Moment) -> ExceededLimit | None:
        refused = decision.admit([(holder, requested)], Copied(self.control.cells), at, {}, 1, 3)
        return None if refused is None else refused[1]

    def _of(self, holder: Holder) -> list[Request]:
        return [each for each in self.all if holder is self.team or each.key == holder.name]

    @rule(target=requests, key=st.sampled_from("ab"), worker=st.integers(0, 1), tokens=st.integers(1, 250))
    def come(self, key: str, worker: int, tokens: int) -> Request | None:
        request = Request(key, worker, Amounts(1, 1, tokens, tokens), self.at, {})
        holders = self.keys[key], self.team
        before = [self._cells(holder) for holder in holders]
        refusing = [(holder, why) for holder in holders if (why := self._refusal(holder, request.requested, self.at)) is not None]
        found = self.workers[worker].reserve([(holder, request.requested) for holder in holders], self.at, request.refilled_at)
        assert found in refusing if refusing else found is None
        if found is None:
            self.all.append(request)
            for holder in holders:
                self._check_admitted(holder)
            return request
        assert before == [self._cells(holder) for holder in holders], "from all or from none"
        if found[1].wait is not None:
            self._check_admitted_after_wait(key, request.requested, found[1])
        return None

    def _check_admitted_after_wait(self, key: str, requested: Amounts, refused: ExceededLimit) -> None:
        """Check that a request that waits as reported is admitted, or refused by another limit whose wait is then correct."""
        at, reported, holders = self.at, (self.keys[key], refused), (self.keys[key], self.team)
        for _ in range(8):
            wait = reported[1].wait
            assert wait is not None
            at = later(at, wait + 1e-5)
            decisions = [(each, self._refusal(each, requested, at)) for each in holders]
            again = [(each, why) for each, why in decisions if why is not None]
            if not again or any(why.wait is None for _, why in again):
                return
            # The limit of a day or month before the clock was set back may be exhausted too.
            assert (again[0][0], again[0][1].reason) != (reported[0], reported[1].reason) or (
                again[0][1].reason not in decision.RATES and at.periods[0] <= self.newest
            )
            reported = again[0]
        raise AssertionError(f"{refused} was not the truth")

    def _check_admitted(self, holder: Holder) -> None:
        limits, mine = holder.limits, self._of(holder)
        assert limits.tokens_per_minute and limits.requests_per_minute and limits.tokens_per_day and limits.concurrent
        assert sum(each.is_open for each in mine) <= limits.concurrent
        self._check_budget(limits.tokens_per_day, [each for each in mine if each.then.periods[0] == self.at.periods[0]])
        self._check_budget(limits.tokens_per_week, [each for each in mine if week(each.then) == week(self.at)])
        self._check_budget(limits.tokens_per_month, [each for each in mine if each.then.periods[2] == self.at.periods[2]])
        self._check_budget(limits.budgets[0].tokens, [each for each in mine if -30 * 86400 <= each.then.wall - self.at.wall <= 0])
        self._check_rates(limits, mine)

    def _check_budget(self, limit: int | None, counted: list[Request]) -> None:
        """Check that requests got no more than a budget, but for what they used beyond their reservations."""
        assert limit is None or sum(each.counted(limit) for each in counted) <= limit + sum(each.beyond(limit) for each in counted)

    def _check_rates(self, limits: Limits, mine: list[Request]) -> None:
        assert limits.tokens_per_minute and limits.requests_per_minute
        requests, tokens = 0.0, 0.0
        for each in reversed(mine):  # the window that starts with this request
            requests, tokens = requests + each.counts, tokens + each.taken(limits.tokens_per_minute)
            minutes = 1 + (self.at.now - each.then.now) / 60
            assert requests <= limits.requests_per_minute * minutes + 1e-4
            assert tokens <= limits.tokens_per_minute * minutes + 1e-4

    @rule(request=consumes(requests), share=st.sampled_from([None, None, 0.0, 0.5, 1.0]), more=st.sampled_from([0, 0, 0, 40]))
    def end(self, request: Request | None, share: float | None, more: int) -> None:
        """Settle a request. ``share``: the used share of its reservation; None: it failed."""
        if request is None or not request.is_open:
            return
        request.is_open, request.counts = False, share is not None
        request.used = 0 if share is None else int(request.requested.tokens * share) + more
        used = Amounts(int(request.counts), 0, request.used, request.used)
        reserved = [(holder, request.requested) for holder in (self.keys[request.key], self.team)]
        self.workers[request.worker].settle(reserved, request.refilled_at, used, request.then, self.at.now)

    @rule(worker=st.integers(0, 1))
    def crash(self, worker: int) -> None:
        """Kill a worker: the slots of its requests are released, and their reserved tokens stay counted."""
        self.workers[worker].close()
        self.workers[worker] = self._worker(worker + 1)
        for each in self.all:
            each.is_open = each.is_open and each.worker != worker

    @rule(seconds=st.floats(0.001, 90))
    def wait(self, seconds: float) -> None:
        self.at = later(self.at, seconds)
        self.newest = max(self.newest, self.at.periods[0])

    @rule(hours=st.integers(-30, 30))
    def set_clock(self, hours: int) -> None:
        """Set only the wall clock. Days before the previous one are forgotten."""
        changed = moment(self.at.now, self.at.wall + hours * 3600)
        if self.newest - 1 <= changed.periods[0] <= self.newest + 1:
            self.at = changed
            self.newest = max(self.newest, changed.periods[0])

    @invariant()
    def nothing_is_lost(self) -> None:
        for holder in (*self.keys.values(), self.team):
            cells, limit = self._cells(holder), holder.limits.tokens_per_day
            assert limit is not None
            assert self.control.in_flight(holder) == sum(each.is_open for each in self._of(holder))
            for window in (DAY, DAY + 3):
                period, tokens = cells[window], cells[window + USED]
                assert not period or tokens == sum(each.counted(limit) for each in self._of(holder) if each.then.periods[0] == period)

    def teardown(self) -> None:
        """Check that all limits per minute are refilled after a while."""
        if not hasattr(self, "control"):
            return
        for holder in (*self.keys.values(), self.team):
            bucket, limits = HolderBuckets(self._cells(holder), self.control.in_flight(holder)), holder.limits
            assert limits.tokens_per_minute and limits.requests_per_minute
            debt = max(bucket.cells[TOKENS], bucket.cells[REQUESTS]) - self.at.now
            beyond = sum(each.beyond(limits.tokens_per_minute) for each in self._of(holder))
            assert debt <= 60 * (1 + beyond / limits.tokens_per_minute) + 1e-6
            fresh = Limits(requests_per_minute=limits.requests_per_minute, concurrent=100)
            assert bucket.fill(fresh, REQUEST, later(self.at, max(debt, 0) + 0.001))[0] == limits.requests_per_minute
        for buckets in (*self.workers, self.control):
            buckets.close()


Limiting.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestLimiting = Limiting.TestCase


def test_amounts_are_nothing_by_default() -> None:
    assert Amounts() == Amounts(0, 0, 0, 0)


def second_refused(limits: Limits, first: Amounts, second: Amounts) -> ExceededLimit:
    """Return the refusal of the second of two requests."""
    bucket = HolderBuckets()
    assert bucket.admit(limits, first) is None
    refused = bucket.admit(limits, second)
    assert refused is not None
    return refused


def test_of_two_equal_waits_that_for_requests_is_reported() -> None:
    refused = second_refused(Limits(requests_per_minute=1, tokens_per_minute=60), Amounts(1, 1, 60), Amounts(1, 1, 60))
    assert refused.reason == "requests_per_minute"
    assert refused.wait == pytest.approx(60)


def test_a_longer_wait_for_requests_is_reported() -> None:
    refused = second_refused(Limits(requests_per_minute=1, tokens_per_minute=60), Amounts(1, 1, 30), Amounts(1, 1, 45))
    assert refused.reason == "requests_per_minute"
    assert refused.wait == pytest.approx(60)


def test_a_refusal_by_tokens_reports_what_is_left() -> None:
    refused = second_refused(Limits(tokens_per_minute=600), Amounts(1, 1, 400), Amounts(1, 1, 300))
    assert refused.left == pytest.approx(200)
    assert refused.requested == 300


def test_workers_share_a_limit_on_concurrent_requests() -> None:
    holder = Holder.placed("one", Limits(concurrent=3))
    cells = [0.0] * (SIZE + 2)

    def admits(worker: int) -> bool:
        return decision.admit([(holder, REQUEST)], cells, AT, {}, worker, 2) is None

    assert [admits(1), admits(1), admits(0), admits(0), admits(1)] == [True, True, True, False, False]
    assert cells[SIZE:] == [1, 2]
    decision.settle([(holder, REQUEST)], cells, REQUEST, {}, AT.now, AT, 1)
    assert cells[SIZE:] == [1, 1] and admits(0) and not admits(1)
