"""The decision which models run, checked in a simulated world of models, requests and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upstream.launcher.schedule import NOT_RUNNING, Action, ActionKind, ModelPhase, ModelView, compete, decide, forecast, linger, time_slice

STEP = 0.25


def view(model: str = "a", phase: ModelPhase = ModelPhase.STOPPED, **more: Any) -> ModelView:
    return ModelView(model, phase, **{"needs": frozenset({0}), "start_seconds": 4.0, **more})


def ready(model: str = "a", **more: Any) -> ModelView:
    return view(model, ModelPhase.READY, **more)


def done(*views: ModelView, now: float = 100.0) -> list[tuple[ActionKind, str]]:
    return [(action.kind, action.model) for action in decide(views, now)]


# One decision


def test_a_requested_model_is_started_and_another_one_is_not() -> None:
    assert done(view("a", wanted_since=99.0), view("b", needs=frozenset({1}))) == [(ActionKind.START, "a")]
    assert done(view("a", ModelPhase.SLEEPING, wanted_since=99.0)) == [(ActionKind.WAKE, "a")]
    assert done(view("a", wanted_since=99.0, held=True)) == []
    assert done(view("a", wanted_since=99.0, in_transition=True)) == []


def test_the_oldest_request_comes_first() -> None:
    wide = view("wide", wanted_since=1.0, needs=frozenset({0, 1}))
    young = view("young", wanted_since=2.0, needs=frozenset({1}))
    running = ready("running", ready_since=99.0, last_used=100.0)
    assert done(young, wide) == [(ActionKind.START, "wide")]
    assert done(young, wide, running) == [], "its turn is not over, and the GPU beside it is kept for who has waited longer"
    assert done(young, running) == [(ActionKind.START, "young")]


@pytest.mark.parametrize(
    ("more", "drains"),
    [
        pytest.param({"ready_since": 99.0, "last_used": 99.9}, False, id="used a moment ago"),
        pytest.param({"ready_since": 99.0, "last_used": 98.0}, False, id="just started"),
        pytest.param({"ready_since": 93.0, "last_used": 98.9}, False, id="used less than its linger ago"),
        pytest.param({"ready_since": 93.0, "last_used": 97.9}, True, id="unused"),
        pytest.param({"ready_since": 93.0, "last_used": 100.0, "in_flight": 3}, False, id="busy, in its turn"),
        pytest.param({"ready_since": 92.0, "last_used": 100.0, "in_flight": 3}, True, id="busy, its turn is over"),
        pytest.param({"ready_since": 0.0, "in_transition": True}, False, id="something is being done with it"),
    ],
)
def test_which_model_makes_room_for_another(more: dict[str, Any], drains: bool) -> None:
    assert (time_slice(view()), linger(view())) == (8.0, 2.0)
    assert done(ready("a", **more), view("b", wanted_since=99.5)) == ([(ActionKind.DRAIN, "a")] if drains else [])


def test_draining_ends_when_no_request_is_in_flight_and_all_workers_know() -> None:
    waiting = view("b", wanted_since=99.0)
    draining = view("a", ModelPhase.DRAINING, in_flight=1, drain_acknowledged=True)
    assert done(draining, waiting) == []
    assert done(replace(draining, in_flight=0, drain_acknowledged=False), waiting) == []
    assert done(replace(draining, in_flight=0), waiting) == [(ActionKind.STOP, "a")]
    assert done(replace(draining, in_flight=0, sleeps=True), waiting) == [(ActionKind.SLEEP, "a")]
    assert done(draining, replace(waiting, wanted_since=None)) == [(ActionKind.RESUME, "a")], "those who waited have left"


def test_the_operators_stop_has_a_timeout() -> None:
    held = view("a", ModelPhase.DRAINING, held=True, in_flight=1, drain_acknowledged=True, drain_timeout=30.0, since=71.0)
    assert done(held) == []
    assert done(held, now=101.0) == [(ActionKind.STOP, "a")]
    assert done(ready("a", held=True, in_flight=1)) == [(ActionKind.DRAIN, "a")]
    assert done(view("a", ModelPhase.STARTING, held=True)) == [(ActionKind.STOP, "a")]
    assert done(view("a", ModelPhase.STARTING, held=True, in_flight=1)) == [(ActionKind.DRAIN, "a")]


def test_an_unused_model() -> None:
    idle = ready("a", last_used=90.0, idle_stop=20.0, idle_sleep=10.0, sleeps=True)
    assert done(idle, now=99.0) == []
    assert done(idle) == [(ActionKind.DRAIN, "a")]
    assert done(replace(idle, wanted_since=99.0)) == done(replace(idle, in_flight=1)) == []
    draining = replace(idle, phase=ModelPhase.DRAINING, drain_acknowledged=True)
    assert done(draining) == [(ActionKind.SLEEP, "a")]
    assert done(replace(draining, in_flight=1)) == [(ActionKind.RESUME, "a")], "a request came while everybody was being told"
    assert done(draining, now=110.0) == done(replace(draining, phase=ModelPhase.SLEEPING), now=110.0) == [(ActionKind.STOP, "a")]


def test_a_failed_one_gives_way_at_once() -> None:
    assert done(view("a", ModelPhase.FAILED, ready_since=99.9), view("b", wanted_since=99.0)) == [(ActionKind.DRAIN, "a")]


def test_eager_ones_share_and_come_back() -> None:
    a, b = (view(name, eager=True, on_demand=False) for name in "ab")
    lazy = view("lazy", wanted_since=99.0)
    assert done(a, b) == [(ActionKind.START, "a"), (ActionKind.START, "b")], "the operator has put both there"
    assert done(a, b, lazy) == [(ActionKind.START, "lazy")]
    up = [replace(each, phase=ModelPhase.READY) for each in (a, b)]
    assert done(*up, lazy) == [(ActionKind.DRAIN, "a"), (ActionKind.DRAIN, "b")]
    assert done(a, b, ready("lazy", ready_since=0.0)) == [], "nobody asks for them"


def test_a_start_names_free_gpus_only_for_a_model_that_has_some() -> None:
    whys = [action.why for action in decide([view("a", eager=True), view("b", eager=True, needs=frozenset({"127.0.0.1:1"}))], 100.0)]
    assert whys == ["eager, and its GPUs are free", "eager"]


def test_a_group_runs_so_many_and_the_least_recently_used_leaves() -> None:
    crowd = [ready(name, group="g", capacity=2, last_used=use) for name, use in (("a", 50.0), ("b", 40.0))]
    assert not compete(*crowd), "members of a group are counted, whatever GPUs they have"
    assert done(*crowd, view("c", wanted_since=99.0, group="g", capacity=2)) == [(ActionKind.DRAIN, "b")]
    draining = [replace(crowd[0], phase=ModelPhase.DRAINING, in_flight=1), crowd[1]]
    assert done(*draining, view("c", wanted_since=99.0, group="g", capacity=2)) == [], "one leaves already"
    assert done(crowd[0], view("c", wanted_since=99.0, group="g", capacity=2)) == [(ActionKind.START, "c")]


def test_forecast() -> None:
    assert forecast([ready(), view("f", ModelPhase.FAILED), view("h", held=True)], 100.0) == {}
    assert forecast([view("a", ModelPhase.STARTING, since=98.0)], 100.0) == {"a": 102.0}
    assert forecast([view("a", ModelPhase.STARTING, since=80.0)], 100.0) == {"a": 105.0}, "it is late already"
    assert forecast([view("a", wanted_since=99.0)], 100.0) == {"a": 104.0}
    both = [ready("a", ready_since=98.0, in_flight=1), view("b", wanted_since=99.0), view("c", wanted_since=99.5)]
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

    models: dict[str, ModelView]
    requests: list[Request]
    now: float = 0.0
    until: dict[str, tuple[float, ModelPhase]] = field(default_factory=dict)
    log: list[tuple[float, Action]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            self.step()

    def step(self) -> None:
        self._finish_what_was_begun()
        self._let_requests_come_and_go()
        views = self.views()
        self._check_capacity(views)
        for action in decide(views, self.now):
            self._begin(action, next(each for each in views if each.model == action.model))
        self.now += STEP

    def views(self) -> list[ModelView]:
        return [
            replace(each, in_flight=len(self._running(name)), wanted_since=min((r.arrives for r in self._waiting(name)), default=None))
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

    def _enter(self, name: str, phase: ModelPhase) -> None:
        before = self.models[name]
        up = self.now if phase is ModelPhase.READY and before.phase is ModelPhase.STARTING else before.ready_since
        self.models[name] = replace(before, phase=phase, since=self.now, in_transition=False, drain_acknowledged=False, ready_since=up)

    def _let_requests_come_and_go(self) -> None:
        for name, each in self.models.items():
            for request in self._waiting(name) if each.phase is ModelPhase.READY else ():
                request.begun = self.now
            if self._running(name):
                self.models[name] = replace(each, last_used=self.now)
            elif each.phase is ModelPhase.DRAINING:
                self.models[name] = replace(each, drain_acknowledged=self.now > each.since)

    def _check_capacity(self, views: Sequence[ModelView]) -> None:
        running = [each for each in views if each.phase not in NOT_RUNNING]
        for one, other in combinations(running, 2):
            assert not compete(one, other), f"{one.model} and {other.model} run together at {self.now}: {self.log}"
        groups: dict[str, int] = defaultdict(int)
        for each in running:
            groups[each.group or each.model] += 1
            assert groups[each.group or each.model] <= each.capacity

    def _begin(self, action: Action, seen: ModelView) -> None:
        self.log.append((self.now, action))
        match action.kind:
            case ActionKind.START | ActionKind.WAKE:
                assert seen.phase in NOT_RUNNING
                self._enter(action.model, ModelPhase.STARTING)
                self.until[action.model] = self.now + seen.start_seconds, ModelPhase.READY
            case ActionKind.DRAIN:
                self._enter(action.model, ModelPhase.DRAINING)
            case ActionKind.RESUME:
                self._enter(action.model, ModelPhase.READY)
            case ActionKind.STOP | ActionKind.SLEEP:
                assert not seen.in_flight and seen.phase in (ModelPhase.DRAINING, ModelPhase.SLEEPING), "a busy one is never stopped"
                self.models[action.model] = replace(self.models[action.model], in_transition=True)
                self.until[action.model] = (
                    self.now + seen.stop_seconds,
                    ModelPhase.STOPPED if action.kind is ActionKind.STOP else ModelPhase.SLEEPING,
                )


SECONDS = st.integers(1, 24).map(lambda quarters: quarters / 4)
GPUS = st.frozensets(st.integers(0, 2), max_size=3)


@st.composite
def models(draw: st.DrawFn) -> dict[str, ModelView]:
    capacity = draw(st.integers(1, 2))
    made: dict[str, ModelView] = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        lazy = draw(st.booleans()) or bool(made)
        grouped = lazy and draw(st.booleans())
        made[name] = ModelView(
            name, ModelPhase.STOPPED, needs=draw(GPUS), group="g" if grouped else None, capacity=capacity if grouped else 1, on_demand=lazy,
            eager=not lazy, start_seconds=draw(SECONDS), stop_seconds=draw(SECONDS), sleeps=draw(st.booleans()),
            idle_stop=draw(st.none() | SECONDS) if lazy else None,
        )  # fmt: skip
    return made


@st.composite
def worlds(draw: st.DrawFn) -> World:
    made = draw(models())
    request = st.builds(Request, st.sampled_from(sorted(made)), st.integers(0, 160).map(lambda quarters: quarters / 4), SECONDS)
    return World(made, draw(st.lists(request, max_size=40)))


def longest_wait(made: Iterable[ModelView], requests: Sequence[Request]) -> float:
    """Each of the others once, and the model's own last round: start, turn, last requests, stop; and steps to see it all."""
    lasts = max((request.lasts for request in requests), default=0.0)
    return sum(each.start_seconds + time_slice(each) + lasts + each.stop_seconds + 6 * STEP for each in made)


@settings(max_examples=examples(100), deadline=None)
@given(worlds())
def test_every_request_is_served_in_bounded_time_and_none_is_cut(world: World) -> None:
    bound = longest_wait(world.models.values(), world.requests)
    world.run(40 + bound)
    for request in world.requests:
        assert request.begun is not None, (request, world.log)
        assert request.begun - request.arrives <= bound, (request, world.log)


@settings(max_examples=examples(40), deadline=None)
@given(worlds())
def test_nothing_happens_without_requests(world: World) -> None:
    bound = longest_wait(world.models.values(), world.requests)
    world.run(40 + 2 * bound + 10)
    stirred = len(world.log)
    world.run(60)
    assert world.log[stirred:] == []


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(SECONDS, min_size=2, max_size=4), SECONDS)
def test_hot_models_take_turns(paces: list[float], lasts: float) -> None:
    """All models are requested continuously: each runs repeatedly, and time slices take most of the time."""
    made = {
        name: ModelView(name, ModelPhase.STOPPED, needs=frozenset({0}), start_seconds=pace, stop_seconds=0.5)
        for name, pace in zip("abcd", paces, strict=False)
    }
    requests = [Request(name, n * (lasts + STEP), lasts) for name in made for n in range(round(120 / lasts))]
    world = World(made, requests)
    world.run(120)
    round_time = longest_wait(made.values(), requests)
    starts = {name: [when for when, action in world.log if action.model == name and action.kind is ActionKind.START] for name in made}
    for name in made:
        assert starts[name], f"{name} was never started"
        assert max((b - a for a, b in zip(starts[name], starts[name][1:], strict=False)), default=0.0) <= round_time
    switches = sum(map(len, starts.values()))
    assert switches <= 120 / (min(time_slice(each) for each in made.values()) + min(paces)) + len(made)
