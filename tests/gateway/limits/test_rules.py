"""The decisions about limits, held against a second way of counting: every request that was ever admitted, added up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from msgspec.structs import replace

from gateway.limits.rules import QUOTAS, Ask, Meter, Moment, Refused, Standing, Window, admitted, month_of, settled, standing
from gateway.state import Limits

LAST_DAY_OF_MAY = datetime(2027, 5, 31, 23, 30, tzinfo=UTC).timestamp()
AT = Moment(1000.0, LAST_DAY_OF_MAY)
REQUEST = Ask(requests=1, slots=1)


def later(at: Moment, seconds: float) -> Moment:
    return Moment(at.now + seconds, at.wall + seconds)


def fill(limits: Limits, ask: Ask, at: Moment = AT, meter: Meter | None = None) -> tuple[Meter, int, Refused]:
    """Ask until it is refused: the meter then, how often it was admitted, and why not any more."""
    meter, count = meter or Meter(), 0
    while True:
        meter, refused = admitted(limits, meter, ask, at)
        if refused is not None:
            return meter, count, refused
        count += 1


@pytest.mark.parametrize(
    ("limits", "ask", "times", "wait"),
    [
        (Limits(requests_per_minute=6), REQUEST, 6, 10),
        (Limits(tokens_per_minute=600), Ask(tokens=100), 6, 10),
        (Limits(tokens_per_minute=600), Ask(tokens=250), 2, 15),
        (Limits(tokens_per_minute=600), Ask(tokens=5000), 1, 60),
        (Limits(tokens_per_day=600), Ask(tokens=250), 2, 1800),
        (Limits(tokens_per_month=600), Ask(tokens=600), 1, 1800),
        (Limits(cost_per_day=1.0), Ask(tokens=1, cost=0.25), 4, 1800),
        (Limits(cost_per_month=1.0), Ask(tokens=1, cost=0.3), 3, 1800),
        (Limits(concurrent=3), REQUEST, 3, None),
    ],
)
def test_a_limit_holds_and_says_when_there_is_room(limits: Limits, ask: Ask, times: int, wait: float | None) -> None:
    meter, count, refused = fill(limits, ask)
    assert count == times
    assert refused.wait == (None if wait is None else pytest.approx(wait))
    if wait is not None:
        assert admitted(limits, meter, ask, later(AT, wait - 0.01))[1] is not None, "not a moment earlier"
        assert admitted(limits, meter, ask, later(AT, wait + 1e-6))[1] is None


def test_the_turn_of_a_minute_means_nothing() -> None:
    limits, at = Limits(requests_per_minute=600), Moment(59.999, LAST_DAY_OF_MAY)
    meter, count, _ = fill(limits, REQUEST, at)
    _, more, _ = fill(limits, REQUEST, later(at, 0.25), meter)
    assert (count, more) == (600, 2)


def test_the_longest_wait_is_told() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=60, tokens_per_day=10)
    _, _, refused = fill(limits, Ask(1, 1, 10))
    assert refused.reason == "tokens_per_day"
    _, _, refused = fill(Limits(requests_per_minute=60, tokens_per_minute=60), Ask(1, 1, 60))
    assert refused.reason == "tokens_per_minute" and refused.wait == pytest.approx(60)


def test_what_was_used_beyond_the_guess_is_paid_off() -> None:
    limits = Limits(tokens_per_minute=600)
    meter, _ = admitted(limits, Meter(), Ask(tokens=100), AT)
    meter = settled(limits, meter, Ask(tokens=100), Ask(tokens=1200), AT.now, AT)
    refused = admitted(limits, meter, Ask(tokens=1), AT)[1]
    assert refused is not None and refused.wait == pytest.approx(60.1)


def test_standing() -> None:
    limits = Limits(requests_per_minute=60)
    meter, _ = admitted(limits, Meter(), REQUEST, AT)
    assert standing(60, meter.requests, AT.now) == Standing(60, 59, 1.0)
    assert standing(60, meter.requests, AT.now + 1) == Standing(60, 60, 0.0)
    assert standing(60, AT.now + 90, AT.now) == Standing(60, 0, 90.0)


def test_the_latest_other_day_is_remembered() -> None:
    """A clock goes a day on, back, two on and one back: that day's count is still known."""
    window = Window().turned(11).plus(11, 5, 0).turned(10).turned(12)
    assert window.turned(11).tokens == 5


def test_months() -> None:
    days = [datetime(2027, month, 1, tzinfo=UTC) for month in range(1, 13)]
    assert [month_of(int(day.timestamp() // 86400)) for day in days] == [2027 * 12 + number for number in range(12)]


@dataclass
class Request:
    """One that was admitted. ``counted``: its tokens at the moment, reserved or used."""

    reserved: Ask
    then: Moment
    counted: int

    @property
    def day(self) -> int:
        return self.then.day

    @property
    def month(self) -> int:
        return self.then.month


LIMITS = Limits(
    requests_per_minute=5,
    tokens_per_minute=100,
    tokens_per_day=400,
    tokens_per_month=600,
    cost_per_day=1e9,
    cost_per_month=5.0,
    concurrent=3,
)


class Limiting(RuleBasedStateMachine):
    """Requests come, are settled, refunded or lost with their relay, while the wall clock goes forth and back over a turn of month."""

    requests = Bundle("requests")

    @initialize()
    def begin(self) -> None:
        self.meter = Meter()
        self.at = AT
        self.newest = AT.day
        self.all: list[Request] = []
        self.open = 0
        self.beyond = 0
        """Tokens that were used beyond what was reserved."""

    @rule(target=requests, tokens=st.integers(1, 250))
    def come(self, tokens: int) -> Request | None:
        ask = Ask(1, 1, tokens, tokens / 100)
        meter, refused = admitted(LIMITS, self.meter, ask, self.at)
        if refused is None:
            self.meter = meter
            self.open += 1
            # More than a bucket holds is not taken in advance of that bucket, but of the day.
            request = Request(ask, self.at, tokens)
            self.all.append(request)
            self._check_admitted(request)
            return request
        assert meter == self.meter
        if refused.wait is not None and self.open < 3:
            self._comes_in_after(ask, refused)
        return None

    def _comes_in_after(self, ask: Ask, refused: Refused) -> None:
        """Who waits as long as he is told gets in, or is told to wait for another limit, which then says the truth."""
        at, meter, told = self.at, self.meter, refused
        for _ in range(6):
            assert told.wait is not None
            at = later(at, told.wait + 1e-5)
            _, again = admitted(LIMITS, meter, ask, at)
            if again is None:
                return
            # A day or month that the clock had been in before it was set back may be used up too.
            assert again.reason != told.reason or (again.reason in QUOTAS and at.day <= self.newest)
            told = again
        raise AssertionError(f"{refused} was not the truth")

    def _check_admitted(self, request: Request) -> None:
        of_day = sum(each.counted for each in self.all if each.day == request.day)
        of_month = sum(each.counted for each in self.all if each.month == request.month)
        assert of_day <= LIMITS.tokens_per_day + self.beyond  # type: ignore[operator]
        assert of_month <= LIMITS.tokens_per_month + self.beyond  # type: ignore[operator]
        assert self.open <= LIMITS.concurrent  # type: ignore[operator]
        passed = sum(min(each.counted, 100) for each in self.all)
        assert passed <= 100 * (1 + (self.at.now - AT.now) / 60) + self.beyond + 1e-6
        assert len(self.all) <= 5 * (1 + (self.at.now - AT.now) / 60) + 1e-6

    @rule(request=consumes(requests), share=st.sampled_from([0.0, 0.5, 1.0]), more=st.sampled_from([0, 0, 0, 40]))
    def end(self, request: Request | None, share: float, more: int) -> None:
        if request is None:
            return
        used = int(request.reserved.tokens * share) + more
        self.beyond += max(used - min(request.counted, 100), 0)
        self.meter = settled(LIMITS, self.meter, request.reserved, Ask(1, 0, used, used / 100), self.at.now, request.then)
        request.counted = used
        self.open -= 1

    @rule(request=consumes(requests))
    def crash(self, request: Request | None) -> None:
        """Its relay dies: its place is free again, what it had reserved stays counted."""
        if request is not None:
            self.meter = replace(self.meter, in_flight=self.meter.in_flight - 1)
            self.open -= 1

    @rule(seconds=st.floats(0.001, 90))
    def wait(self, seconds: float) -> None:
        self.at = later(self.at, seconds)
        self.newest = max(self.newest, self.at.day)

    @rule(hours=st.integers(-30, 30))
    def set_clock(self, hours: int) -> None:
        """The wall clock alone; a day more than one back is forgotten."""
        changed = Moment(self.at.now, self.at.wall + hours * 3600)
        if self.newest - 1 <= changed.day <= self.newest + 1:
            self.at = changed
            self.newest = max(self.newest, changed.day)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.meter.in_flight == self.open
        for period, tokens in ((self.meter.day.period, self.meter.day.tokens), (self.meter.day.other, self.meter.day.other_tokens)):
            if period:
                assert tokens == sum(min(each.counted, 400) if each.counted == each.reserved.tokens else each.counted
                                     for each in self.all if each.day == period)  # fmt: skip

    def teardown(self) -> None:
        """A while later all of a minute's limits are there again."""
        if not hasattr(self, "meter"):
            return
        debt = max(self.meter.tokens, self.meter.requests) - self.at.now
        fresh = Limits(requests_per_minute=5, tokens_per_minute=100, concurrent=self.open + 5)
        assert debt <= 60 * (1 + self.beyond / 100) + 1e-6
        assert fill(fresh, REQUEST, later(self.at, max(debt, 0) + 0.001), self.meter)[1] == 5


Limiting.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLimiting = Limiting.TestCase
