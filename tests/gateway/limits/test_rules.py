"""The decisions about limits, held against a second way of counting: every request that was ever admitted, added up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gateway.limits import rules
from gateway.limits.buckets import Buckets, Holder
from gateway.limits.rules import (
    DAY,
    QUOTAS,
    REQUESTS,
    SIZE,
    TOKENS,
    USED,
    Amounts,
    BucketState,
    ExceededLimit,
    Moment,
    bucket_state,
    moment,
    month_of,
)
from gateway.snapshot.snapshot import Limits
from tests.support.examples import examples

LAST_DAY_OF_MAY = datetime(2027, 5, 31, 23, 30, tzinfo=UTC).timestamp()
AT = moment(1000.0, LAST_DAY_OF_MAY)
REQUEST = Amounts(requests=1, slots=1)


def later(at: Moment, seconds: float) -> Moment:
    return moment(at.now + seconds, at.wall + seconds)


class Meter:
    """One by itself, of which some requests are under way."""

    def __init__(self, cells: Sequence[float] = (0.0,) * SIZE, in_flight: float = 0) -> None:
        self.cells = list(cells)
        self.in_flight = in_flight

    def admit(self, limits: Limits, ask: Amounts, at: Moment = AT, ends: dict[int, float] | None = None) -> ExceededLimit | None:
        refused = rules.admit(limits, self.cells, 0, self.in_flight, ask, at, {} if ends is None else ends)
        if refused is None:
            self.in_flight += ask.slots
        return refused

    def fill(self, limits: Limits, ask: Amounts, at: Moment = AT) -> tuple[int, ExceededLimit]:
        """Ask until it is refused: how often it was admitted, and why not any more."""
        count = 0
        while (refused := self.admit(limits, ask, at)) is None:
            count += 1
        return count, refused


@pytest.mark.parametrize(
    ("limits", "ask", "times", "wait"),
    [
        (Limits(requests_per_minute=6), REQUEST, 6, 10),
        (Limits(tokens_per_minute=600), Amounts(tokens=100), 6, 10),
        (Limits(tokens_per_minute=600), Amounts(tokens=250), 2, 15),
        (Limits(tokens_per_minute=600), Amounts(tokens=5000), 1, 60),
        (Limits(tokens_per_day=600), Amounts(tokens=250), 2, 1800),
        (Limits(tokens_per_month=600), Amounts(tokens=600), 1, 1800),
        (Limits(cost_per_day=1.0), Amounts(tokens=1, cost=0.25), 4, 1800),
        (Limits(cost_per_month=1.0), Amounts(tokens=1, cost=0.3), 3, 1800),
        (Limits(concurrent=3), REQUEST, 3, None),
    ],
)
def test_a_limit_holds_and_says_when_there_is_room(limits: Limits, ask: Amounts, times: int, wait: float | None) -> None:
    meter = Meter()
    count, refused = meter.fill(limits, ask)
    assert count == times
    assert refused.wait == (None if wait is None else pytest.approx(wait))
    if wait is not None:
        assert meter.admit(limits, ask, later(AT, wait - 0.01)) is not None, "not a moment earlier"
        assert meter.admit(limits, ask, later(AT, wait + 1e-6)) is None


def test_the_turn_of_a_minute_means_nothing() -> None:
    limits, at, meter = Limits(requests_per_minute=600), moment(59.999, LAST_DAY_OF_MAY), Meter()
    count, _ = meter.fill(limits, REQUEST, at)
    more, _ = meter.fill(limits, REQUEST, later(at, 0.25))
    assert (count, more) == (600, 2)


def test_the_longest_wait_is_told() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=60, tokens_per_day=10)
    _, refused = Meter().fill(limits, Amounts(1, 1, 10))
    assert refused.reason == "tokens_per_day"
    _, refused = Meter().fill(Limits(requests_per_minute=60, tokens_per_minute=60), Amounts(1, 1, 60))
    assert refused.reason == "tokens_per_minute" and refused.wait == pytest.approx(60)


def test_what_was_used_beyond_the_guess_is_paid_off() -> None:
    account = Account(Limits(tokens_per_minute=600))
    account.settle(Amounts(tokens=100), Amounts(tokens=1200), account.take(Amounts(tokens=100)))
    refused = account.meter.admit(account.limits, Amounts(tokens=1))
    assert refused is not None and refused.wait == pytest.approx(60.1)


@dataclass
class Account:
    """What is admitted by one meter, with the clock by its side, and how much in all."""

    limits: Limits
    meter: Meter = field(default_factory=Meter)
    at: Moment = AT
    passed: int = 0

    def take(self, ask: Amounts) -> dict[int, float]:
        """Until when it is missing."""
        ends: dict[int, float] = {}
        assert self.meter.admit(self.limits, ask, self.at, ends) is None
        return ends

    def fill(self, ask: Amounts) -> None:
        """As often as there is room."""
        self.passed += self.meter.fill(self.limits, ask, self.at)[0]

    def settle(self, ask: Amounts, used: Amounts, ends: dict[int, float]) -> None:
        rules.settle(self.limits, self.meter.cells, 0, ask, used, ends, self.at.now, AT)

    def wait(self, seconds: float) -> None:
        self.at = later(self.at, seconds)


def test_requests_that_fail_late_make_no_room_twice() -> None:
    """Sixty that end in an error after two minutes, while others of the same key come as fast as they may."""
    account = Account(Limits(requests_per_minute=60))
    failing = [account.take(REQUEST) for _ in range(60)]
    account.wait(60)
    account.fill(REQUEST)
    for ends in failing:
        account.settle(REQUEST, Amounts(), ends)
        account.wait(1)
        account.fill(REQUEST)
    assert account.passed <= 60 * 2


def test_tokens_that_time_has_given_back_are_not_given_back_again() -> None:
    account = Account(Limits(tokens_per_minute=1000))
    ends = account.take(Amounts(tokens=1000))
    account.wait(120)
    account.fill(Amounts(tokens=10))
    account.settle(Amounts(tokens=1000), Amounts(tokens=20), ends)
    account.fill(Amounts(tokens=10))
    assert account.passed == 100


def test_what_moved_up_is_not_given_back_as_if_it_had_not() -> None:
    """Half a bucket each for two. The first gives its half back at once, so the second's is filled up half a minute earlier."""
    account, half = Account(Limits(tokens_per_minute=600)), Amounts(tokens=300)
    first, second = account.take(half), account.take(half)
    account.settle(half, Amounts(), first)
    account.wait(29)
    account.take(half)
    account.wait(1)
    account.settle(half, Amounts(), second)
    account.fill(Amounts(tokens=1))
    assert account.passed <= 600 * (1 + 1 / 60) - 300


@pytest.mark.parametrize(("after", "missing"), [(0, 31.2), (30, 1.2), (59, 0)])
def test_what_is_still_missing_is_given_back(after: float, missing: float) -> None:
    """Half a bucket is reserved where half a minute was missing: it is missing for a minute, and of 28.8 seconds so much is given back."""
    account = Account(Limits(tokens_per_minute=100))
    account.fill(Amounts(tokens=50))
    account.wait(30)
    ends = account.take(Amounts(tokens=50))
    account.wait(after)
    account.settle(Amounts(tokens=50), Amounts(tokens=2), ends)
    assert account.meter.cells[TOKENS] - account.at.now == pytest.approx(missing)


def test_standing() -> None:
    account = Account(Limits(requests_per_minute=60))
    account.take(REQUEST)
    full = account.meter.cells[REQUESTS]
    assert bucket_state(60, full, AT.now) == BucketState(60, 59, 1.0)
    assert bucket_state(60, full, AT.now + 1) == BucketState(60, 60, 0.0)
    assert bucket_state(60, AT.now + 90, AT.now) == BucketState(60, 0, 90.0)


def test_the_latest_other_day_is_remembered() -> None:
    """A clock goes a day on, back, two on and one back: that day's count is still known."""
    limits, meter, days = Limits(tokens_per_day=5), Meter(), [later(AT, day * 86400) for day in range(3)]
    assert meter.admit(limits, Amounts(tokens=5), days[1]) is None
    assert [meter.admit(limits, Amounts(tokens=1), days[day]) for day in (0, 2)] == [None, None]
    assert meter.admit(limits, Amounts(tokens=1), days[1]) is not None


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
    tokens_per_month=some(300),
    cost_per_day=some(4),
    cost_per_month=some(5),
    concurrent=some(3),
)
periods = st.tuples(st.integers(-1, 1), st.integers(0, 300), st.integers(0, 5))
meters = st.builds(
    lambda full, back, days, months: [
        *(AT.now + seconds for seconds in full),
        *back,
        *(AT.day + days[0][0], *days[0][1:], AT.day + days[1][0], *days[1][1:]),
        *(AT.month + months[0][0], *months[0][1:], AT.month + months[1][0], *months[1][1:]),
    ],
    st.tuples(st.floats(-90, 90), st.floats(-90, 90)),
    st.tuples(st.floats(0, 90), st.floats(0, 90)),
    st.tuples(periods, periods),
    st.tuples(periods, periods),
)
asks = st.builds(Amounts, st.integers(0, 1), st.integers(0, 1), st.integers(0, 250), st.integers(0, 4))


@given(limits_of_all_kinds, meters, st.integers(0, 4), asks)
def test_admitted_is_who_is_not_refused_and_nothing_is_taken_from_others(
    limits: Limits, cells: list[float], flying: int, ask: Amounts
) -> None:
    assert len(cells) == SIZE
    before, expected = list(cells), rules.exceeded_limit(limits, cells, 0, flying, ask, AT)
    ends: dict[int, float] = {}
    assert rules.admit(limits, cells, 0, flying, ask, AT, ends) == expected
    assert expected is None or (cells == before and not ends)


KEYS = Limits(
    requests_per_minute=5,
    tokens_per_minute=100,
    tokens_per_day=400,
    tokens_per_month=600,
    cost_per_day=1e9,
    cost_per_month=5.0,
    concurrent=3,
)
TEAM = Limits(requests_per_minute=7, tokens_per_minute=150, tokens_per_day=600, concurrent=4)


@dataclass
class Request:
    """One that was admitted. ``used``: its tokens, once it is over; ``counts``: as a request."""

    key: str
    worker: int
    ask: Amounts
    then: Moment
    ends: dict[int, float]
    used: int | None = None
    counts: bool = True
    is_open: bool = True

    def taken(self, limit: float) -> float:
        """What it keeps of what it took in advance."""
        return min(self.ask.tokens, limit) if self.used is None else min(self.ask.tokens, limit, self.used)

    def counted(self, limit: float) -> float:
        """Its tokens in a day or month."""
        return min(self.ask.tokens, limit) if self.used is None else self.used

    def beyond(self, limit: float) -> float:
        """Tokens that it used beyond what it took in advance."""
        return 0 if self.used is None else max(self.used - min(self.ask.tokens, limit), 0)


class Limiting(RuleBasedStateMachine):
    """Requests of two keys of a team come to two workers, are settled, fail or are lost with their worker, while the wall clock goes forth
    and back over a turn of month."""

    requests = Bundle("requests")

    @initialize()
    def begin(self) -> None:
        self.control = Buckets.create("limits", 3)
        self.workers = [self._worker(1), self._worker(2)]
        self.team = self.control.holder("team", TEAM)
        self.keys = {name: self.control.holder(name, KEYS) for name in "ab"}
        self.at = AT
        self.newest = AT.day
        self.all: list[Request] = []

    def _worker(self, number: int) -> Buckets:
        return Buckets.inherited(os.dup(self.control.fd), number)

    def _meter(self, holder: Holder) -> list[float]:
        return list(self.control.cells[holder.offset : holder.offset + SIZE])

    def _refusal(self, holder: Holder, ask: Amounts, at: Moment) -> ExceededLimit | None:
        return rules.exceeded_limit(holder.limits, self.control.cells, holder.offset, self.control.in_flight(holder.offset), ask, at)

    def _of(self, holder: Holder) -> list[Request]:
        return [each for each in self.all if holder is self.team or each.key == holder.name]

    @rule(target=requests, key=st.sampled_from("ab"), worker=st.integers(0, 1), tokens=st.integers(1, 250))
    def come(self, key: str, worker: int, tokens: int) -> Request | None:
        request = Request(key, worker, Amounts(1, 1, tokens, tokens / 100), self.at, {})
        holders = self.keys[key], self.team
        before = [self._meter(holder) for holder in holders]
        refusing = [(holder, why) for holder in holders if (why := self._refusal(holder, request.ask, self.at)) is not None]
        found = self.workers[worker].reserve([(holder, request.ask) for holder in holders], self.at, request.ends)
        assert found in refusing if refusing else found is None
        if found is None:
            self.all.append(request)
            for holder in holders:
                self._check_admitted(holder)
            return request
        assert before == [self._meter(holder) for holder in holders], "from all or from none"
        if found[1].wait is not None:
            self._comes_in_after(key, request.ask, found[1])
        return None

    def _comes_in_after(self, key: str, ask: Amounts, refused: ExceededLimit) -> None:
        """Who waits as long as he is told gets in, or is told to wait for another limit, which then says the truth."""
        at, told, holders = self.at, (self.keys[key], refused), (self.keys[key], self.team)
        for _ in range(8):
            wait = told[1].wait
            assert wait is not None
            at = later(at, wait + 1e-5)
            answers = [(each, self._refusal(each, ask, at)) for each in holders]
            again = [(each, why) for each, why in answers if why is not None]
            if not again or any(why.wait is None for _, why in again):
                return
            # A day or month that the clock had been in before it was set back may be used up too.
            assert (again[0][0], again[0][1].reason) != (told[0], told[1].reason) or (
                again[0][1].reason in QUOTAS and at.day <= self.newest
            )
            told = again[0]
        raise AssertionError(f"{refused} was not the truth")

    def _check_admitted(self, holder: Holder) -> None:
        limits, mine = holder.limits, self._of(holder)
        assert limits.tokens_per_minute and limits.requests_per_minute and limits.tokens_per_day and limits.concurrent
        assert sum(each.is_open for each in mine) <= limits.concurrent
        for limit, period in ((limits.tokens_per_day, "day"), (limits.tokens_per_month, "month")):
            now = getattr(self.at, period)
            counted = [each for each in mine if getattr(each.then, period) == now]
            assert limit is None or sum(each.counted(limit) for each in counted) <= limit + sum(each.beyond(limit) for each in counted)
        requests, tokens = 0.0, 0.0
        for each in reversed(mine):  # the window that begins with it
            requests, tokens = requests + each.counts, tokens + each.taken(limits.tokens_per_minute)
            minutes = 1 + (self.at.now - each.then.now) / 60
            assert requests <= limits.requests_per_minute * minutes + 1e-4
            assert tokens <= limits.tokens_per_minute * minutes + 1e-4

    @rule(request=consumes(requests), share=st.sampled_from([None, None, 0.0, 0.5, 1.0]), more=st.sampled_from([0, 0, 0, 40]))
    def end(self, request: Request | None, share: float | None, more: int) -> None:
        """``share``: of what it has reserved; None: it failed."""
        if request is None or not request.is_open:
            return
        request.is_open, request.counts = False, share is not None
        request.used = 0 if share is None else int(request.ask.tokens * share) + more
        used = Amounts(int(request.counts), 0, request.used, request.used / 100)
        reserved = [(holder, request.ask) for holder in (self.keys[request.key], self.team)]
        self.workers[request.worker].settle(reserved, request.ends, used, request.then, self.at.now)

    @rule(worker=st.integers(0, 1))
    def crash(self, worker: int) -> None:
        """A worker dies: the places of its requests are free again, what they had reserved stays counted."""
        self.workers[worker].close()
        self.workers[worker] = self._worker(worker + 1)
        for each in self.all:
            each.is_open = each.is_open and each.worker != worker

    @rule(seconds=st.floats(0.001, 90))
    def wait(self, seconds: float) -> None:
        self.at = later(self.at, seconds)
        self.newest = max(self.newest, self.at.day)

    @rule(hours=st.integers(-30, 30))
    def set_clock(self, hours: int) -> None:
        """The wall clock alone; a day more than one back is forgotten."""
        changed = moment(self.at.now, self.at.wall + hours * 3600)
        if self.newest - 1 <= changed.day <= self.newest + 1:
            self.at = changed
            self.newest = max(self.newest, changed.day)

    @invariant()
    def nothing_is_lost(self) -> None:
        for holder in (*self.keys.values(), self.team):
            cells, limit = self._meter(holder), holder.limits.tokens_per_day
            assert limit is not None
            assert self.control.in_flight(holder.offset) == sum(each.is_open for each in self._of(holder))
            for window in (DAY, DAY + 3):
                period, tokens = cells[window], cells[window + USED]
                assert not period or tokens == sum(each.counted(limit) for each in self._of(holder) if each.then.day == period)

    def teardown(self) -> None:
        """A while later all of a minute's limits are there again."""
        if not hasattr(self, "control"):
            return
        for holder in (*self.keys.values(), self.team):
            meter, limits = Meter(self._meter(holder), self.control.in_flight(holder.offset)), holder.limits
            assert limits.tokens_per_minute and limits.requests_per_minute
            debt = max(meter.cells[TOKENS], meter.cells[REQUESTS]) - self.at.now
            beyond = sum(each.beyond(limits.tokens_per_minute) for each in self._of(holder))
            assert debt <= 60 * (1 + beyond / limits.tokens_per_minute) + 1e-6
            fresh = Limits(requests_per_minute=limits.requests_per_minute, concurrent=100)
            assert meter.fill(fresh, REQUEST, later(self.at, max(debt, 0) + 0.001))[0] == limits.requests_per_minute
        for meters in (*self.workers, self.control):
            meters.close()


Limiting.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestLimiting = Limiting.TestCase
