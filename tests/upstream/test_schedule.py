"""Which models run: the decision, held to its promises in a small world of models, requests and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upstream.launcher.schedule import PARKED, Action, Do, Phase, View, compete, decide, forecast, linger, turn

STEP = 0.25


def view(model: str = "a", phase: Phase = Phase.STOPPED, **more: Any) -> View:
    return View(model, phase, **{"needs": frozenset({0}), "pace": 4.0, **more})


def ready(model: str = "a", **more: Any) -> View:
    return view(model, Phase.READY, **more)


def done(*views: View, now: float = 100.0) -> list[tuple[Do, str]]:
    return [(action.do, action.model) for action in decide(views, now)]


# One decision


def test_one_that_is_wanted_is_started_and_one_that_is_not_is_left() -> None:
    assert done(view("a", wanted=99.0), view("b", needs=frozenset({1}))) == [(Do.START, "a")]
    assert done(view("a", Phase.SLEEPING, wanted=99.0)) == [(Do.WAKE, "a")]
    assert done(view("a", wanted=99.0, held=True)) == []
    assert done(view("a", wanted=99.0, busy_with=True)) == []


def test_the_oldest_comes_first_and_nobody_takes_its_place() -> None:
    wide = view("wide", wanted=1.0, needs=frozenset({0, 1}))
    young = view("young", wanted=2.0, needs=frozenset({1}))
    running = ready("running", ready_since=99.0, last_use=100.0)
    assert done(young, wide) == [(Do.START, "wide")]
    assert done(young, wide, running) == [], "its turn is not over, and the GPU beside it is kept for who has waited longer"
    assert done(young, running) == [(Do.START, "young")]


@pytest.mark.parametrize(
    ("more", "leaves"),
    [
        pytest.param({"ready_since": 99.0, "last_use": 99.9}, False, id="used a moment ago"),
        pytest.param({"ready_since": 99.0, "last_use": 98.0}, False, id="just started"),
        pytest.param({"ready_since": 93.0, "last_use": 98.9}, False, id="used less than its linger ago"),
        pytest.param({"ready_since": 93.0, "last_use": 97.9}, True, id="unused"),
        pytest.param({"ready_since": 93.0, "last_use": 100.0, "in_flight": 3}, False, id="busy, in its turn"),
        pytest.param({"ready_since": 92.0, "last_use": 100.0, "in_flight": 3}, True, id="busy, its turn is over"),
        pytest.param({"ready_since": 0.0, "busy_with": True}, False, id="something is being done with it"),
    ],
)
def test_who_leaves_for_another(more: dict[str, Any], leaves: bool) -> None:
    assert (turn(view()), linger(view())) == (8.0, 2.0)
    assert done(ready("a", **more), view("b", wanted=99.5)) == ([(Do.DRAIN, "a")] if leaves else [])


def test_draining_ends_when_nothing_is_in_flight_and_everybody_knows() -> None:
    waiting = view("b", wanted=99.0)
    draining = view("a", Phase.DRAINING, in_flight=1, acknowledged=True)
    assert done(draining, waiting) == []
    assert done(replace(draining, in_flight=0, acknowledged=False), waiting) == []
    assert done(replace(draining, in_flight=0), waiting) == [(Do.STOP, "a")]
    assert done(replace(draining, in_flight=0, sleeps=True), waiting) == [(Do.SLEEP, "a")]
    assert done(draining, replace(waiting, wanted=None)) == [(Do.RESUME, "a")], "those who waited have left"


def test_the_operators_word_ends_the_patience() -> None:
    held = view("a", Phase.DRAINING, held=True, in_flight=1, acknowledged=True, patience=30.0, since=71.0)
    assert done(held) == []
    assert done(held, now=101.0) == [(Do.STOP, "a")]
    assert done(ready("a", held=True, in_flight=1)) == [(Do.DRAIN, "a")]
    assert done(view("a", Phase.STARTING, held=True)) == [(Do.STOP, "a")]
    assert done(view("a", Phase.STARTING, held=True, in_flight=1)) == [(Do.DRAIN, "a")]


def test_one_that_is_unused() -> None:
    idle = ready("a", last_use=90.0, idle_stop=20.0, idle_sleep=10.0, sleeps=True)
    assert done(idle, now=99.0) == []
    assert done(idle) == [(Do.DRAIN, "a")]
    assert done(replace(idle, wanted=99.0)) == done(replace(idle, in_flight=1)) == []
    draining = replace(idle, phase=Phase.DRAINING, acknowledged=True)
    assert done(draining) == [(Do.SLEEP, "a")]
    assert done(replace(draining, in_flight=1)) == [(Do.RESUME, "a")], "a request came while everybody was being told"
    assert done(draining, now=110.0) == done(replace(draining, phase=Phase.SLEEPING), now=110.0) == [(Do.STOP, "a")]


def test_a_failed_one_gives_way_at_once() -> None:
    assert done(view("a", Phase.FAILED, ready_since=99.9), view("b", wanted=99.0)) == [(Do.DRAIN, "a")]


def test_eager_ones_share_and_come_back() -> None:
    a, b = (view(name, eager=True, on_demand=False) for name in "ab")
    lazy = view("lazy", wanted=99.0)
    assert done(a, b) == [(Do.START, "a"), (Do.START, "b")], "the operator has put both there"
    assert done(a, b, lazy) == [(Do.START, "lazy")]
    up = [replace(each, phase=Phase.READY) for each in (a, b)]
    assert done(*up, lazy) == [(Do.DRAIN, "a"), (Do.DRAIN, "b")]
    assert done(a, b, ready("lazy", ready_since=0.0)) == [], "nobody asks for them"


def test_a_group_runs_so_many_and_the_least_recently_used_leaves() -> None:
    crowd = [ready(name, group="g", capacity=2, last_use=use) for name, use in (("a", 50.0), ("b", 40.0))]
    assert not compete(*crowd), "members of a group are counted, whatever GPUs they have"
    assert done(*crowd, view("c", wanted=99.0, group="g", capacity=2)) == [(Do.DRAIN, "b")]
    leaving = [replace(crowd[0], phase=Phase.DRAINING, in_flight=1), crowd[1]]
    assert done(*leaving, view("c", wanted=99.0, group="g", capacity=2)) == [], "one leaves already"
    assert done(crowd[0], view("c", wanted=99.0, group="g", capacity=2)) == [(Do.START, "c")]


def test_forecast() -> None:
    assert forecast([ready(), view("f", Phase.FAILED), view("h", held=True)], 100.0) == {}
    assert forecast([view("a", Phase.STARTING, since=98.0)], 100.0) == {"a": 102.0}
    assert forecast([view("a", Phase.STARTING, since=80.0)], 100.0) == {"a": 105.0}, "it is late already"
    assert forecast([view("a", wanted=99.0)], 100.0) == {"a": 104.0}
    both = [ready("a", ready_since=98.0, in_flight=1), view("b", wanted=99.0), view("c", wanted=99.5)]
    # a's turn ends at 106 and it stops until 111; b starts until 115, has its turn until 123 and stops until 128
    assert forecast(both, 100.0) == {"b": 115.0, "c": 132.0}


# Many decisions, in a world


@dataclass
class Request:
    model: str
    arrives: float
    lasts: float
    begun: float | None = None


@dataclass
class World:
    """Models that take time to start and stop, requests that last, and the decision each step."""

    models: dict[str, View]
    requests: list[Request]
    now: float = 0.0
    until: dict[str, tuple[float, Phase]] = field(default_factory=dict)
    log: list[tuple[float, Action]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            self.step()

    def step(self) -> None:
        self._finish_what_was_begun()
        self._let_requests_come_and_go()
        views = self.views()
        self._check_places(views)
        for action in decide(views, self.now):
            self._begin(action, next(each for each in views if each.model == action.model))
        self.now += STEP

    def views(self) -> list[View]:
        return [
            replace(each, in_flight=len(self._running(name)), wanted=min((r.arrives for r in self._waiting(name)), default=None))
            for name, each in self.models.items()
        ]

    def _waiting(self, name: str) -> list[Request]:
        return [r for r in self.requests if r.model == name and r.arrives <= self.now and r.begun is None]

    def _running(self, name: str) -> list[Request]:
        return [r for r in self.requests if r.model == name and r.begun is not None and self.now < r.begun + r.lasts]

    def _finish_what_was_begun(self) -> None:
        for name, (when, phase) in tuple(self.until.items()):
            if self.now >= when:
                del self.until[name]
                self._enter(name, phase)

    def _enter(self, name: str, phase: Phase) -> None:
        before = self.models[name]
        up = self.now if phase is Phase.READY and before.phase is Phase.STARTING else before.ready_since
        self.models[name] = replace(before, phase=phase, since=self.now, busy_with=False, acknowledged=False, ready_since=up)

    def _let_requests_come_and_go(self) -> None:
        for name, each in self.models.items():
            for request in self._waiting(name) if each.phase is Phase.READY else ():
                request.begun = self.now
            if self._running(name):
                self.models[name] = replace(each, last_use=self.now)
            elif each.phase is Phase.DRAINING:
                self.models[name] = replace(each, acknowledged=self.now > each.since)

    def _check_places(self, views: Sequence[View]) -> None:
        running = [each for each in views if each.phase not in PARKED]
        for one, other in combinations(running, 2):
            assert not compete(one, other), f"{one.model} and {other.model} run together at {self.now}: {self.log}"
        groups: dict[str, int] = defaultdict(int)
        for each in running:
            groups[each.group or each.model] += 1
            assert groups[each.group or each.model] <= each.capacity

    def _begin(self, action: Action, seen: View) -> None:
        self.log.append((self.now, action))
        match action.do:
            case Do.START | Do.WAKE:
                assert seen.phase in PARKED
                self._enter(action.model, Phase.STARTING)
                self.until[action.model] = self.now + seen.pace, Phase.READY
            case Do.DRAIN:
                self._enter(action.model, Phase.DRAINING)
            case Do.RESUME:
                self._enter(action.model, Phase.READY)
            case Do.STOP | Do.SLEEP:
                assert not seen.in_flight and seen.phase in (Phase.DRAINING, Phase.SLEEPING), "a busy one is never stopped"
                self.models[action.model] = replace(self.models[action.model], busy_with=True)
                self.until[action.model] = self.now + seen.leave, Phase.STOPPED if action.do is Do.STOP else Phase.SLEEPING


SECONDS = st.integers(1, 24).map(lambda quarters: quarters / 4)
GPUS = st.frozensets(st.integers(0, 2), max_size=3)


@st.composite
def models(draw: st.DrawFn) -> dict[str, View]:
    capacity = draw(st.integers(1, 2))
    made: dict[str, View] = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        lazy = draw(st.booleans()) or bool(made)
        grouped = lazy and draw(st.booleans())
        made[name] = View(
            name, Phase.STOPPED, needs=draw(GPUS), group="g" if grouped else None, capacity=capacity if grouped else 1, on_demand=lazy,
            eager=not lazy, pace=draw(SECONDS), leave=draw(SECONDS), sleeps=draw(st.booleans()),
            idle_stop=draw(st.none() | SECONDS) if lazy else None,
        )  # fmt: skip
    return made


@st.composite
def worlds(draw: st.DrawFn) -> World:
    made = draw(models())
    request = st.builds(Request, st.sampled_from(sorted(made)), st.integers(0, 160).map(lambda quarters: quarters / 4), SECONDS)
    return World(made, draw(st.lists(request, max_size=40)))


def longest_wait(made: Iterable[View], requests: Sequence[Request]) -> float:
    """Each of the others once, and the model's own last round: start, turn, last requests, stop; and steps to see it all."""
    lasts = max((request.lasts for request in requests), default=0.0)
    return sum(each.pace + turn(each) + lasts + each.leave + 6 * STEP for each in made)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_everybody_is_served_in_bounded_time_and_nobody_is_cut(world: World) -> None:
    bound = longest_wait(world.models.values(), world.requests)
    world.run(40 + bound)
    for request in world.requests:
        assert request.begun is not None, (request, world.log)
        assert request.begun - request.arrives <= bound, (request, world.log)


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_nothing_happens_where_nobody_asks(world: World) -> None:
    bound = longest_wait(world.models.values(), world.requests)
    world.run(40 + 2 * bound + 10)
    stirred = len(world.log)
    world.run(60)
    assert world.log[stirred:] == []


@settings(max_examples=20, deadline=None)
@given(st.lists(SECONDS, min_size=2, max_size=4), SECONDS)
def test_hot_models_take_turns(paces: list[float], lasts: float) -> None:
    """Each is asked for all the time: each is served again and again, and most of the time goes into turns."""
    made = {name: View(name, Phase.STOPPED, needs=frozenset({0}), pace=pace, leave=0.5) for name, pace in zip("abcd", paces, strict=False)}
    asked = [Request(name, n * (lasts + STEP), lasts) for name in made for n in range(round(120 / lasts))]
    world = World(made, asked)
    world.run(120)
    round_time = longest_wait(made.values(), asked)
    starts = {name: [when for when, action in world.log if action.model == name and action.do is Do.START] for name in made}
    for name in made:
        assert starts[name], f"{name} was never started"
        assert max((b - a for a, b in zip(starts[name], starts[name][1:], strict=False)), default=0.0) <= round_time
    switches = sum(map(len, starts.values()))
    assert switches <= 120 / (min(turn(each) for each in made.values()) + min(paces)) + len(made)
