"""The limit of a server by its metrics: on engines of known capacity, played in virtual time, and rule by rule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upstream.simulator.engine.batch import Batch, BatchLimits, StepTime
from upstream.vllm.auto_max_inflight import (
    MOST,
    START,
    WINDOW,
    AutoLimit,
    Bounds,
    LoadSample,
    Objectives,
    Speed,
    most_useful,
    next_limit,
    unreachable,
)
from upstream.vllm.engine_counters import EngineMetrics

ANY, NONE = Bounds(), Objectives()
_BOUNDS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, math.inf)


@dataclass(eq=False)
class Played:
    """A server with the simulator's batch, and clients that send a request after each response. ``limit`` bounds it.

    With ``rate``, so many requests arrive in a second instead, of which ``clients`` wait at most, and ``in_time`` have their first token
    within ``ttft`` seconds.
    """

    step: StepTime
    sequences: int
    clients: int
    prompt: int = 20
    output: int = 50
    limit: int = START
    batch_tokens: int = 2048
    time: float = 0.0
    generated: int = 0
    seconds: float = 0.0
    gaps: int = 0
    rate: float = 0.0
    ttft: float = math.inf
    in_time: int = 0
    _first: dict[float, int] = field(default_factory=lambda: dict.fromkeys(_BOUNDS, 0))
    _queued: deque[int] = field(default_factory=deque)
    _began: dict[int, float] = field(default_factory=dict)
    _arrived: dict[int, float] = field(default_factory=dict)
    _next: float = 0.0

    def __post_init__(self) -> None:
        self._numbers, self._draw = count(), Random(1)
        self.batch = Batch[int](self.step, BatchLimits(self.batch_tokens, self.sequences), lambda _: self.prompt)
        self._queued.extend(next(self._numbers) for _ in range(0 if self.rate else self.clients))

    def run(self, seconds: float) -> None:
        """Play the steps of so many seconds."""
        until = self.time + seconds
        self._send()
        while self.time < until:
            if (took := self.batch.begin_step()) is None:  # no request has arrived yet
                self.time = self._next
                self._send()
                continue
            steps = min(self.batch.equal_steps, math.ceil((until - self.time) / took))
            self.time += steps * took
            streams = steps * sum(1 for _ in self.batch.generating)
            done = self.batch.complete(steps)
            self.gaps += streams
            self.seconds += took * streams
            self.generated += streams + len(done.first)
            for request in done.first:
                self.in_time += self.time - self._arrived.pop(request, self.time) <= self.ttft
                self._first[next(bound for bound in _BOUNDS if self.time - self._began[request] <= bound)] += 1
            for request in done.finished:
                del self._began[request]
                if not self.rate:
                    self._queued.append(next(self._numbers))
            self._send()

    def _send(self) -> None:
        while self.rate and self._next <= self.time:
            if len(self._queued) < self.clients:
                self._queued.append(next(self._numbers))
                self._arrived[self._queued[-1]] = self._next
            self._next += self._draw.expovariate(self.rate)
        while self._queued and len(self._began) < self.limit:
            request = self._queued.popleft()
            self._began[request] = self.time
            self.batch.add(request, round(self.output * self._draw.uniform(0.5, 1.5)))

    def sample(self) -> LoadSample:
        """Return the load of the server now."""
        total, cumulative = 0, []
        for bound, number in self._first.items():
            total += number
            cumulative.append((bound, float(total)))
        load = self.batch.running, self.batch.waiting
        metrics = EngineMetrics(*load, 0, token_seconds=self.seconds, token_gaps=float(self.gaps), first_tokens=tuple(cumulative))
        return LoadSample(self.time, metrics, len(self._began), len(self._queued))

    def followed(self, seconds: int, bounds: Bounds = ANY, objectives: Objectives = NONE) -> Iterator[AutoLimit]:
        """Yield the limit in each second, which the server follows."""
        limit = AutoLimit(self.limit)
        for _ in range(seconds):
            self.run(1.0)
            limit = next_limit(limit, self.sample(), bounds, objectives)
            self.limit = limit.value
            yield limit

    def tokens_per_second(self, seconds: float) -> float:
        """Return the speed in the next so many seconds, with the limit of now."""
        before, began = self.generated, self.time
        self.run(seconds)
        return (self.generated - before) / (self.time - began)


STEP = StepTime(0.02, 0.0002, 0.00001)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 300), st.integers(1, 1000))
def test_a_limit_converges_to_what_the_engine_runs_from_below_and_from_above(sequences: int, start: int) -> None:
    engine = Played(STEP, sequences, clients=1500, limit=start)
    *_, limit = engine.followed(60)
    assert sequences <= limit.value <= 1.25 * most_useful(sequences) + 1


@settings(max_examples=examples(20), deadline=None)
@given(
    sequences=st.integers(1, 256),
    clients=st.integers(1, 500),
    prompt=st.integers(1, 2000),
    output=st.integers(5, 200),
    base=st.floats(0.001, 0.05),
    slope=st.floats(0.00001, 0.002),
)
def test_a_limit_is_as_fast_as_no_limit_and_does_not_oscillate(**of_engine: Any) -> None:
    base, slope = of_engine.pop("base"), of_engine.pop("slope")
    step = StepTime(base, slope, 0.00001)
    engine, unlimited = Played(step, **of_engine), Played(step, **of_engine, limit=MOST)
    values = [limit.value for limit in engine.followed(120)]
    unlimited.run(120)
    assert engine.tokens_per_second(20) >= 0.9 * unlimited.tokens_per_second(20)
    assert max(values[80:]) <= 2 * min(values[80:]) + 4


def test_a_limit_that_gives_no_more_tokens_is_not_raised() -> None:
    """From some 100 requests on, each step takes nearly as much longer as it has more requests."""
    engine, unlimited = (Played(StepTime(0.002, 0.001, 0.00001), 1024, 1200, limit=limit) for limit in (START, MOST))
    *_, limit = engine.followed(60)
    unlimited.run(60)
    assert limit.value < 400 and limit.reason == "more requests give no more tokens per second"
    assert engine.tokens_per_second(20) > 0.97 * unlimited.tokens_per_second(20)


@pytest.mark.parametrize(("itl", "fewest", "most"), [(0.05, 50, 60), (0.01, 30, 60)], ids=["reachable", "unreachable"])
def test_the_objective_between_tokens_is_met_as_far_as_fewer_requests_are_faster(itl: float, fewest: int, most: int) -> None:
    """A step takes 20 ms and 0.5 ms for each request: 60 take 50 ms, and 40 take twice the time of one."""
    engine = Played(StepTime(0.02, 0.0005, 0.00001), 256, 600)
    *_, limit = engine.followed(90, objectives=Objectives(itl=itl))
    assert fewest <= limit.value <= most and f"with slo.itl {1000 * itl:.0f} ms" in limit.reason


def test_the_objective_for_the_first_token_is_met() -> None:
    """Prompts of 1,000 tokens use up the steps: with 128 requests all of them wait for longer than a second, with 100 none does."""
    engine = Played(StepTime(0.01, 0.0002, 0.00003), 256, 600, prompt=1000)
    values = [limit.value for limit in engine.followed(120, objectives=Objectives(ttft=1.0))]
    assert min(values[40:]) >= 40 and max(values[40:]) <= 120


@pytest.mark.parametrize(
    ("step", "sequences", "prompt", "output", "capacity", "fixed", "least"),
    [
        (StepTime(0.08, 0.001, 0.00002), 24, 1, 20, 11.5, (16, 24, 26, 28, 32, 64), 0.97),
        (StepTime(0.02, 0.0002, 0.00001), 128, 100, 100, 25.0, (64, 100, 128, 140, 160, 200), 0.97),
        (StepTime(0.01, 0.0002, 0.00003), 256, 1000, 50, 22.0, (32, 64, 80, 98, 110, 128, 160), 0.97),
        (StepTime(0.01, 0.0002, 0.00003), 256, 1000, 200, 13.0, (98, 160, 200, 256, 280), 0.94),
    ],
    ids=["few requests", "many requests", "long prompts", "long prompts and outputs"],
)
def test_above_the_capacity_nearly_as_many_first_tokens_are_in_time_as_with_the_best_limit(
    step: StepTime, sequences: int, prompt: int, output: int, capacity: float, fixed: tuple[int, ...], least: float
) -> None:
    """Requests arrive at 1.5 times the capacity, and the gateway's queue has room for a third of the objective."""

    def engine(limit: int) -> Played:
        queue = round(capacity * 2 / 3)
        return Played(step, sequences, queue, prompt, output, limit, rate=1.5 * capacity, ttft=2.0)

    rates = []
    for limit in fixed:
        unchanged = engine(limit)
        unchanged.run(60)
        unchanged.in_time, began = 0, unchanged.time
        unchanged.run(120)
        rates.append(unchanged.in_time / (unchanged.time - began))
    automatic, objectives = engine(START), Objectives(ttft=2.0)
    deque(automatic.followed(60, objectives=objectives), 0)
    automatic.in_time, began = 0, automatic.time
    deque(automatic.followed(120, objectives=objectives), 0)
    assert automatic.in_time / (automatic.time - began) >= least * max(rates)


# Rule by rule

ENGINE = EngineMetrics(running=64, waiting=0, cache_tokens=0)


def after(*engines: Mapping[str, Any], in_flight: int = 64, queued: int = 1, limit: AutoLimit | None = None) -> AutoLimit:
    """Return the limit of 64 after a sample with these values in each second."""
    limit = limit or AutoLimit(64)
    for second, engine in enumerate(engines):
        limit = next_limit(limit, LoadSample(float(second), replace(ENGINE, **engine), in_flight, queued), Bounds(2, 100), NONE)
    return limit


def test_only_a_limit_that_holds_requests_back_is_raised() -> None:
    assert after({}).value > 64
    unused = after({}, in_flight=20, queued=0)
    assert (unused.value, unused.reason) == (64, "enough for the load")
    assert after({}, in_flight=60, queued=0).value > 64
    assert after({}, in_flight=20, queued=5).value == 64, "they wait for another reason"


def test_increases_become_larger_until_an_obstacle() -> None:
    first = after({})
    second = next_limit(first, LoadSample(9.0, ENGINE, first.value, 1), Bounds(2, 1000), NONE)
    assert second.value - first.value > first.value - 64
    obstructed = next_limit(first, LoadSample(9.0, replace(ENGINE, kv_usage=0.97), first.value, 1), Bounds(2, 1000), NONE)
    assert (obstructed.value, obstructed.reason) == (first.value, "the KV cache is 97% full")
    assert obstructed.growth < first.growth


def test_a_queue_must_be_seen_in_a_whole_window() -> None:
    waits = {"running": 30, "waiting": 34, "token_gaps": 1e6, "token_seconds": 1.0}
    early = after(*[waits] * (WINDOW - 1))
    assert (early.value, early.reason) == (64, "the engine is full: 34 requests wait in the engine")
    a_step = [waits | {"waiting": 33}] * WINDOW
    assert after(*a_step).value == 64, "no token was generated, so they may wait for a single step"
    counted = [waits | {"token_gaps": 1000.0 * at, "token_seconds": 10.0 * at} for at in range(WINDOW)]
    assert after(*counted).value == 30 + 3
    assert after(*counted[:-1], counted[-1] | {"waiting": 0}).value > 64, "it was a burst"
    assert after(*counted, in_flight=16).value == 8, "another gateway takes back its part"


def test_one_request_that_waits_is_one_request() -> None:
    busy = [{"running": 8, "waiting": 1, "token_gaps": 1000.0 * at, "token_seconds": 10.0 * at} for at in range(WINDOW)]
    assert after(*busy, limit=AutoLimit(9), in_flight=9).value > 9
    busy = [each | {"waiting": 2} for each in busy]
    assert after(*busy, limit=AutoLimit(10), in_flight=10).reason == "the engine is full: 2 requests wait in the engine"


def test_preempted_requests_lower_a_limit_once_until_it_has_taken_effect() -> None:
    lowered = after({"preempted": 5.0}, {"preempted": 6.0})
    assert lowered.value < after({}).value and lowered.reason == "the engine preempted 1 request: its KV cache is full"
    again = replace(ENGINE, preempted=9.0)
    still_running = next_limit(lowered, LoadSample(9.0, again, lowered.value + 1, 1), Bounds(), NONE)
    assert still_running.value == lowered.value
    settled = next_limit(lowered, LoadSample(9.0, again, lowered.value, 1), Bounds(), NONE)
    assert settled.value < lowered.value and "preempted 4 requests" in settled.reason


def test_counters_of_an_earlier_process_are_not_compared() -> None:
    restarted = after({"token_gaps": 100.0, "preempted": 1.0}, {"token_gaps": 5.0, "preempted": 7.0})
    assert len(restarted.samples) == 1 and restarted.value > 64


def test_a_limit_stays_while_metrics_cannot_be_read() -> None:
    unchanged = unreachable(after({}, {}))
    assert unchanged.value == after({}, {}).value and unchanged.reason == "its metrics cannot be read, so the last value stays"
    assert after({}, limit=unchanged).reason != unchanged.reason


def test_a_bound_is_named() -> None:
    assert after(*[{}] * 20).reason == "the engine has room for more requests; 100 is the highest limit"


def test_the_gain_needs_points_of_different_numbers_of_requests() -> None:
    same = different = Speed()
    for number in range(20):
        same, different = same.with_point(50, 0.03), different.with_point(10 + number, 0.02 + 0.001 * (10 + number))
    assert same.gain(50) is None and same.cheap() == 0
    gain = different.gain(20)
    assert gain is not None and gain[1] and math.isclose(gain[0], 0.5) and math.isclose(different.cheap(), 20)


_COUNTS, _TOTALS = st.integers(0, 5000), st.floats(0, 1e9)
_FIRST_TOKENS = st.tuples(_TOTALS, _TOTALS).map(lambda counts: ((0.5, min(counts)), (math.inf, max(counts))))
_METRICS = st.builds(EngineMetrics, _COUNTS, _COUNTS, st.just(0), st.floats(0, 1), _TOTALS, _TOTALS, _TOTALS, _FIRST_TOKENS)


@given(
    st.lists(st.tuples(_METRICS, st.integers(0, 10_000), st.integers(0, 100)), max_size=30),
    st.integers(1, 50),
    st.integers(0, 100),
    st.sampled_from([NONE, Objectives(1.0, 0.05)]),
)
def test_a_limit_stays_within_its_bounds(
    samples: list[tuple[EngineMetrics, int, int]], least: int, more: int, objectives: Objectives
) -> None:
    bounds = Bounds(least, least + more)
    limit = AutoLimit(bounds.start)
    for second, (engine, in_flight, queued) in enumerate(samples):
        limit = next_limit(limit, LoadSample(float(second), engine, in_flight, queued), bounds, objectives)
        assert bounds.least <= limit.value <= bounds.most and limit.reason
