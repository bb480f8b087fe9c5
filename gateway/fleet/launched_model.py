"""One launched model and where it is in its life: what the fleet keeps of it, and how ``schedule`` sees it.

The rule: its phase comes from its servers' own states, except while the fleet itself is doing something with it.
Times are in seconds of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable

from gateway import config as conf
from gateway.config import Config
from gateway.fleet import plan
from gateway.fleet.launch_diff import shape
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.launcher.schedule import ModelPhase, ModelView

FIRST_START, FIRST_WAKE, FIRST_STOP = 60.0, 3.0, 5.0
"""Seconds that each is expected to take before it has been measured."""
REMEMBERED = 5
"""Of so many the longest counts."""


class Pace:
    """How long something takes: the longest of the last times, in seconds; at first, a guess."""

    def __init__(self, guess: float) -> None:
        self._guess = guess
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def longest(self) -> float:
        return max(self._last, default=self._guess)


class Resident:
    """A launched model.

    ``gone``: the configuration no longer has it, and it leaves when its last request has ended; ``surplus``: its servers that the
    configuration no longer has. ``tried``: the shape that its servers were last given, or failed to take.

    ``step``: what the fleet is doing with it, None where its servers' states say it all. ``task``: the work of that, and
    ``ending`` that this work ends it. ``away``: its servers that are to take no requests although the model is up.
    ``ordered``: since when the operator wants it up; ``held``: he wants it down. ``told``: the number of the word by which
    workers send it no new requests.
    """

    def __init__(self, config: Config, model: conf.Model, launch: conf.Launch, now: float) -> None:
        self.id = model.id
        self.surplus = frozenset[str]()
        self.gone = False
        self._needs = frozenset[int | str]()
        self.follow(config, model, launch)
        self.tried = shape(self.specs)
        # Where it is
        self.phase = ModelPhase.STOPPED
        self.since = self.ready_since = self.last_use = now
        self._served = 0.0
        self._has_been_up = False
        self._began: float | None = None
        # What is done with it
        self.step: ModelPhase | None = None
        self.task: asyncio.Task[None] | None = None
        self.ending = False
        self.away: set[str] = set()
        self.told = 0
        self.ordered: float | None = None
        self.held = False
        # How long that takes
        self._starts, self.wakes, self.stops = Pace(FIRST_START), Pace(FIRST_WAKE), Pace(FIRST_STOP)

    def follow(self, config: Config, model: conf.Model, launch: conf.Launch, running: Iterable[str] = ()) -> None:
        """Take over what the configuration says. ``running``: its servers that there are at the moment."""
        self.launch = launch
        self.specs = plan.launches_of(config, model)
        wanted = frozenset(spec.name for spec in self.specs)
        self.surplus = frozenset(running) - wanted
        self.names = wanted | self.surplus
        self.asked_as = (model.id, *(lora.id for lora in model.loras))
        self._needs = plan.needs(launch) | (self._needs if running else frozenset())
        self._capacity = next((group.max_running for group in config.groups if group.id == launch.group), 1)
        self.patience = config.server.drain
        if self.gone:
            self.gone = self.held = False

    def dismiss(self) -> None:
        """The configuration no longer has it: its requests may end, however long they take."""
        self.gone = self.held = True
        self.ordered, self.patience = None, math.inf

    def settled(self) -> None:
        """Of its servers there are none but those that the configuration has."""
        self.names -= self.surplus
        self.away &= self.names
        self.surplus = frozenset()
        self._needs = plan.needs(self.launch)

    @property
    def sleeps(self) -> bool:
        """Whether its servers can be put to sleep."""
        return self.launch.idle_sleep is not None

    def started(self, now: float) -> None:
        """Its servers have been started just now."""
        self._began = now

    def used(self, served: float, in_flight: float, now: float) -> None:
        """Take in how many requests for it have ended so far, and how many are under way."""
        if served != self._served or in_flight:
            self._served, self.last_use = served, now

    def see(self, statuses: Iterable[LaunchStatus], now: float) -> None:
        """Take in the states of its servers."""
        stages = {status.name: status.state for status in statuses if status.name in self.names}
        counted = {state for name, state in stages.items() if name not in self.away and name not in self.surplus}
        phase = self.step or _phase(counted, bool(stages))
        if phase is not self.phase:
            self._enter(phase, now)

    def _enter(self, phase: ModelPhase, now: float) -> None:
        if phase is ModelPhase.READY:
            self.ordered, self._has_been_up = None, True
            if self.phase is not ModelPhase.DRAINING:
                self.ready_since = now
            if self._began is not None:
                self._starts.add(now - self._began)
        if phase in (ModelPhase.READY, ModelPhase.FAILED):
            self._began = None
        self.phase, self.since = phase, now

    def view(self, *, asked: float | None, in_flight: int, acknowledged: bool) -> ModelView:
        """How it is to be seen. ``asked``: since when requests wait for it."""
        launch = self.launch
        wakes = self.sleeps and (
            self.step is ModelPhase.STARTING or self.phase in (ModelPhase.READY, ModelPhase.DRAINING, ModelPhase.SLEEPING)
        )
        return ModelView(
            self.id,
            self.phase,
            since=self.since,
            needs=self._needs,
            group=launch.group,
            capacity=self._capacity,
            on_demand=launch.start == "on_demand" or self.gone,  # nobody has put the next one beside it
            wanted_since=min((since for since in (asked, self.ordered) if since is not None), default=None),
            in_flight=in_flight,
            drain_acknowledged=acknowledged,
            ready_since=self.ready_since,
            last_used=self.last_use,
            start_seconds=(self.wakes if wakes else self._starts).longest,
            stop_seconds=self.stops.longest,
            eager=launch.start == "eager" and (launch.idle_stop is None or not self._has_been_up),
            sleeps=self.sleeps,
            idle_stop=launch.idle_stop,
            idle_sleep=launch.idle_sleep,
            held=self.held,
            drain_timeout=self.patience,
            in_transition=self.task is not None,
        )


def _phase(stages: set[LaunchState], launched: bool) -> ModelPhase:
    """What the states of a model's servers make it. ``launched``: there are some, though perhaps none that counts."""
    if not launched:
        return ModelPhase.STOPPED
    for stage, phase in ((LaunchState.READY, ModelPhase.READY), (LaunchState.STARTING, ModelPhase.STARTING)):
        if stage in stages:
            return phase
    return ModelPhase.FAILED if stages - {LaunchState.STOPPING, LaunchState.STOPPED} else ModelPhase.DRAINING
