"""Find the number of requests that a vLLM server runs best at once, from its own metrics. Pure.

``next_limit`` is called with a sample about once a second. The rules: the engine has a short queue, so that it never runs dry,
and all other requests wait in the gateway. A limit grows only while it holds requests back. It falls at once to what the engine can run,
and by small steps for anything else, each of which first takes effect. A limit never leaves its bounds, whatever the metrics say.

The signals, in their order: requests that wait in the engine, requests that it preempted, the latency objectives, the KV cache, and the
tokens per second. For the last one, the time between two tokens is fitted by a line over the number of running requests, as a step of vLLM
takes a constant time and a time for each of its requests: ``n`` requests get ``n / (base + slope * n)`` tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from upstream.vllm.engine_counters import EngineMetrics

START = 64
MOST = 4096
"""The upper bound for a server whose ``--max-num-seqs`` is unknown."""
WINDOW = 4
"""Samples in which a queue must be seen: a request may wait for a step, and the prompts of a burst for some more."""
_SETTLING = 4.0  # seconds after a decrease has taken effect, before the next one by the latency, and before an increase
_SLOWEST, _FASTEST = 1 / 32, 1 / 4  # increase of a limit: after an obstacle, and after a row of increases
_DECREASE = 1 / 16
_FULL_CACHE = 0.95
_SLOW, _NEARLY_SLOW = 0.1, 0.05  # share of requests whose first token is late: the limit falls, does not grow
_OWN_PART = 1 / 3  # of the objective for the first token: the rest is for the queue of the gateway
_MEMORY = 0.99  # weight of earlier samples of the speed: some 100 seconds
_RECENT = 0.8  # weight of earlier requests in the share of late ones: some 5 seconds
_FEW = 10  # requests, or tokens, that show nothing yet
_GAIN, _CERTAIN = 0.02, 0.02  # least relative gain of tokens per relative increase of requests, and its standard error if it is known


def most_useful(sequences: int) -> int:
    """Return the highest useful limit of an engine that runs so many requests: more would only wait in it."""
    return sequences + 2 * _queue(sequences)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and the highest limit."""

    least: int = 1
    most: int = MOST

    def clipped(self, value: float) -> int:
        """Return the nearest limit within the bounds."""
        return max(self.least, min(self.most, round(value)))

    @property
    def start(self) -> int:
        """The limit of a server without samples."""
        return self.clipped(START)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds to the first token, and between two tokens; None: no objective."""

    ttft: float | None = None
    itl: float | None = None


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load of a server at a time, in seconds. ``in_flight``: requests of this gateway. ``queued``: requests that wait in it."""

    time: float
    engine: EngineMetrics
    in_flight: int
    queued: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds between two tokens (``y``) over the number of running requests (``x``): the sums of a least-squares fit of a line."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def with_point(self, x: float, y: float) -> Speed:
        """Return the fit with another point, in which earlier points weigh less."""
        before = (_MEMORY * each for each in (self.weight, self.x, self.y, self.xx, self.xy, self.yy))
        return Speed(*(old + new for old, new in zip(before, (1.0, x, y, x * x, x * y, y * y), strict=True)))

    def line(self) -> tuple[float, float, float] | None:
        """Return the base, the slope, and the standard error of the base; None without points of different ``x``."""
        spread = self.weight * self.xx - self.x * self.x
        if self.weight < WINDOW or spread <= 1e-9 * self.xx:
            return None
        slope = (self.weight * self.xy - self.x * self.y) / spread
        base = (self.y - slope * self.x) / self.weight
        squares = max(self.yy - base * self.y - slope * self.xy, 0.0) / self.weight
        return base, slope, math.sqrt(squares * self.xx / spread)

    def gain(self, running: float) -> tuple[float, bool] | None:
        """Return by which part of an increase of the requests the tokens per second increase, and whether that is certain."""
        if (line := self.line()) is None:
            return None
        base, slope, error = line
        seconds = base + slope * running
        return (base / seconds, error < _CERTAIN * seconds) if seconds > 0 else None

    def cheap(self) -> float:
        """Return how many requests together take twice the time of a single one: fewer are hardly faster. 0 if it is not known."""
        line = self.line()
        if line is None or line[1] <= 0 or line[2] > line[0] / 2:
            return 0.0
        return line[0] / line[1]


@dataclass(frozen=True, slots=True)
class AutoLimit:
    """The limit of a server, the reason for it, and what the next one depends on.

    ``late``, ``first_tokens``: recent requests whose first token was late, and all of them. ``settled``: when the last decrease has
    taken effect. ``is_flat``: the limit stays because more requests gave no more tokens.
    """

    value: int
    reason: str = "no measurement yet"
    growth: float = _FASTEST / 2
    samples: tuple[LoadSample, ...] = ()
    speed: Speed = Speed()
    late: float = 0.0
    first_tokens: float = 0.0
    settled: float = 0.0
    is_flat: bool = False


def unreachable(limit: AutoLimit) -> AutoLimit:
    """Return a limit whose server does not report its metrics: it keeps its value."""
    return replace(limit, reason="its metrics cannot be read, so the last value stays", samples=())


def next_limit(limit: AutoLimit, sample: LoadSample, bounds: Bounds, objectives: Objectives) -> AutoLimit:
    """Return the limit after another sample."""
    state = _observed(limit, sample, objectives)
    view = _View(state, sample, objectives)
    change = next(found for rule in _RULES if (found := rule(view)) is not None)
    value = bounds.clipped(change.value)
    if value < limit.value:
        return replace(state, value=value, reason=change.reason, growth=_SLOWEST, settled=sample.time + _SETTLING, is_flat=change.is_flat)
    if value > limit.value:
        return replace(state, value=value, reason=change.reason, growth=min(2 * state.growth, _FASTEST), is_flat=change.is_flat)
    at_bound = "" if change.value == value else f"; {value} is the {'lowest' if change.value < value else 'highest'} limit"
    growth = state.growth if change.keeps_growth or at_bound else _SLOWEST
    return replace(state, reason=change.reason + at_bound, growth=growth, is_flat=change.is_flat)


def _observed(limit: AutoLimit, sample: LoadSample, objectives: Objectives) -> AutoLimit:
    """Return the state with a sample. Counters that went backwards belong to an earlier process of the server."""
    before = limit.samples[-1] if limit.samples else None
    if before is None or sample.time <= before.time or sample.engine.token_gaps < before.engine.token_gaps:
        return replace(limit, samples=(sample,))
    state = replace(limit, samples=(*limit.samples, sample)[-WINDOW:])
    if (seconds := _seconds_between_tokens(before.engine, sample.engine)) is not None:
        state = replace(state, speed=limit.speed.with_point(sample.engine.running, seconds))
    if sample.in_flight > limit.value:  # an earlier decrease has no effect yet
        return replace(state, settled=max(limit.settled, sample.time + _SETTLING), late=0.0, first_tokens=0.0)
    if objectives.ttft is None:
        return state
    late, all_requests = _late(before.engine, sample.engine, _OWN_PART * objectives.ttft)
    return replace(state, late=_RECENT * limit.late + late, first_tokens=_RECENT * limit.first_tokens + all_requests)


def _seconds_between_tokens(before: EngineMetrics, after: EngineMetrics) -> float | None:
    """Return the mean time between two tokens of a stream; None if too few were generated."""
    gaps = after.token_gaps - before.token_gaps
    return (after.token_seconds - before.token_seconds) / gaps if gaps >= _FEW else None


def _started(engine: EngineMetrics) -> float:
    """Return how many requests have had their first token."""
    return engine.first_tokens[-1][1] if engine.first_tokens else 0.0


def _late(before: EngineMetrics, after: EngineMetrics, bound: float) -> tuple[float, float]:
    """Return the requests between two samples whose first token took longer than ``bound`` seconds, and all of them."""
    earlier = dict(before.first_tokens)
    counts = [(upper, count - earlier.get(upper, 0.0)) for upper, count in after.first_tokens]
    lower = below = within = 0.0
    for upper, count in counts:
        if upper <= bound:
            within = count
        elif lower < bound and upper < math.inf:
            within = below + (count - below) * (bound - lower) / (upper - lower)
        lower, below = upper, count
    return below - within, below


class _Change(NamedTuple):
    """A limit that a rule wants. ``keeps_growth``: an unchanged limit is no obstacle. ``is_flat``: see ``AutoLimit``."""

    value: float
    reason: str
    keeps_growth: bool = False
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class _View:
    """The state with the last sample, as the rules see it."""

    state: AutoLimit
    sample: LoadSample
    objectives: Objectives

    @property
    def value(self) -> int:
        return self.state.value

    @property
    def engine(self) -> EngineMetrics:
        return self.sample.engine

    @property
    def entering(self) -> float:
        """The requests that wait only for the end of a step: those that arrive in it. Without tokens to measure a step, all that run."""
        first, last = self.state.samples[0], self.sample
        step, seconds = _seconds_between_tokens(first.engine, last.engine), last.time - first.time
        if step is None or seconds <= 0:
            return self.engine.running
        return step * (_started(last.engine) - _started(first.engine)) / seconds

    @property
    def is_settled(self) -> bool:
        return self.sample.time >= self.state.settled

    def lowered(self, reason: str, *, least: float = 0.0, is_flat: bool = False) -> _Change:
        """Lower the limit by a step, unless the last decrease is still without effect, but not below ``least``."""
        step = max(1.0, _DECREASE * self.value) if self.is_settled else 0.0
        return _Change(max(self.value - step, min(least, self.value)), reason, is_flat=is_flat)


def _waiting(view: _View) -> _Change | None:
    """Lower the limit to what runs and a short queue, if twice that queue waits in every sample of the window."""
    samples, entering = view.state.samples, view.entering
    fewest = min(samples, key=lambda sample: sample.engine.waiting)
    running, waiting, queue = fewest.engine.running, fewest.engine.waiting - entering, _queue(fewest.engine.running)
    if len(samples) == WINDOW and running and waiting > 2 * queue:
        share = min(fewest.in_flight / (running + waiting), 1.0)  # another gateway may use the server too, and takes back its own part
        return _Change(min(view.value, fewest.in_flight - share * (waiting - queue)), _in_the_engine(fewest.engine.waiting))
    if view.engine.waiting - entering > 2 * _queue(view.engine.running):
        return _Change(view.value, _in_the_engine(view.engine.waiting))
    return _Change(view.value, f"the engine is full: {_in_the_engine(fewest.engine.waiting)}") if waiting >= queue else None


def _queue(running: int) -> int:
    """Return how many requests should wait in an engine, so that it never runs dry."""
    return 2 + running // 16


def _in_the_engine(waiting: int) -> str:
    return f"{waiting} {'request waits' if waiting == 1 else 'requests wait'} in the engine"


def _preempted(view: _View) -> _Change | None:
    """Lower the limit if the engine had to preempt requests."""
    preempted = int(view.engine.preempted - view.state.samples[0].engine.preempted)
    if preempted <= 0:
        return None
    return view.lowered(f"the engine preempted {preempted} {'request' if preempted == 1 else 'requests'}: its KV cache is full")


def _slow_tokens(view: _View) -> _Change | None:
    """Lower the limit if the tokens of a stream are slower than the objective."""
    bound = view.objectives.itl
    if bound is None or (seconds := _seconds_between_tokens(view.state.samples[0].engine, view.engine)) is None:
        return None
    text = f"{1000 * seconds:.0f} ms between two tokens, with slo.itl {1000 * bound:.0f} ms"
    if seconds > bound and view.value > view.state.speed.cheap():
        return view.lowered(text, least=view.state.speed.cheap())
    return _Change(view.value, text) if 0.9 * bound < seconds <= bound else None


def _slow_first_tokens(view: _View) -> _Change | None:
    """Lower the limit if too many requests wait too long for their first token."""
    state, bound = view.state, view.objectives.ttft
    if bound is None or state.first_tokens < _FEW:
        return None
    share = state.late / state.first_tokens
    text = f"{100 * share:.0f}% of the first tokens take more than {_OWN_PART * bound:.2g} s, a third of slo.ttft"
    if share > _SLOW and view.value > state.speed.cheap():
        return view.lowered(text, least=state.speed.cheap())
    return _Change(view.value, text) if _NEARLY_SLOW < share <= _SLOW else None


def _enough(view: _View) -> _Change | None:
    """Keep a limit that holds no request back."""
    is_used_up = view.sample.in_flight >= (0.5 if view.sample.queued else 0.9) * view.value  # a part of it may be used up in one worker
    return None if is_used_up else _Change(view.value, "enough for the load", keeps_growth=True, is_flat=view.state.is_flat)


def _unsettled(view: _View) -> _Change | None:
    """Keep a limit until the last decrease has taken effect."""
    return None if view.is_settled else _Change(view.value, view.state.reason, is_flat=view.state.is_flat)


def _full_cache(view: _View) -> _Change | None:
    """Keep a limit while the KV cache has no room for more requests."""
    usage = view.engine.kv_usage
    return _Change(view.value, f"the KV cache is {100 * usage:.0f}% full") if usage >= _FULL_CACHE else None


def _flat(view: _View) -> _Change | None:
    """Keep a limit beyond which there is nothing to gain, and lower it if there is something to lose.

    The gain becomes uncertain without recent points of other numbers of requests. If more gave nothing before, fewer are then tried.
    """
    found = view.state.speed.gain(view.engine.running)
    if found is None or found[0] >= _GAIN:
        return None
    gain, is_certain = found
    if not is_certain:
        return view.lowered("fewer requests are tried: more gave no more tokens per second", is_flat=True) if view.state.is_flat else None
    if gain < -_GAIN:
        return view.lowered("fewer requests give more tokens per second", is_flat=True)
    return _Change(view.value, "more requests give no more tokens per second", is_flat=True)


def _grow(view: _View) -> _Change | None:
    """Raise a limit that holds requests back, step by step."""
    growth = _SLOWEST if view.engine.waiting > view.entering else view.state.growth
    step = max(1.0, growth * view.value)
    return _Change(view.value + step, "the engine has room for more requests")


_RULES: tuple[Callable[[_View], _Change | None], ...] = (
    _waiting,
    _preempted,
    _slow_tokens,
    _slow_first_tokens,
    _enough,
    _unsettled,
    _full_cache,
    _flat,
    _grow,
)
"""The first rule that applies decides."""
