"""One launched model: what the fleet stores about it, and its view for the scheduler.

The rule: its phase follows from the states of its servers, except during a transition of the fleet.
Times are in seconds of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.configured_servers import exclusive_resources, launches_of
from gateway.fleet.launch_diff import comparable
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.launcher.schedule import ModelPhase, ModelView

FIRST_START, FIRST_WAKE, FIRST_STOP = 60.0, 3.0, 5.0
"""Assumed duration of each transition in seconds, until it has been measured."""
REMEMBERED = 5
"""Number of stored measurements; the longest is used."""


class LaunchedModel:
    """A launched model.

    Configuration: ``removed``: it is no longer in the configuration, and is stopped after its last request. ``surplus``: its running
    servers that are no longer in the configuration. ``tried``: the last launch settings that were applied or tried.

    Transition: ``step`` is the phase that a transition sets, or None if the states of its servers determine the phase. ``task`` runs the
    transition, and ``stopping`` is set if it stops the model. ``out_of_rotation``: its servers that get no requests although the model is
    ready. ``drain_number``: the number of the message that takes it out of the workers' rotation. ``started_at``: when its servers were
    started, until they are ready or have failed. ``start_times``, ``wake_times`` and ``stop_times`` are the last measurements, in seconds.

    Operator: ``wanted_since``: the time at which an operator started it. ``held``: an operator has stopped it.
    """

    def __init__(self, config: Config, model: conf.Model, launch: conf.Launch, now: float) -> None:
        # Configuration
        self.id = model.id
        self.surplus = frozenset[str]()
        self.removed = False
        self._resources = frozenset[int | str]()
        self.configure(config, model, launch)
        self.tried = comparable(self.specs)
        # ModelPhase
        self.phase = ModelPhase.STOPPED
        self.since = self.ready_since = self.last_used = now
        self._served = 0.0
        self._was_ready = False
        # Transition
        self.step: ModelPhase | None = None
        self.task: asyncio.Task[None] | None = None
        self.stopping = False
        self.out_of_rotation: set[str] = set()
        self.drain_number = 0
        self.started_at: float | None = None
        self.start_times, self.wake_times, self.stop_times = (deque[float](maxlen=REMEMBERED) for _ in range(3))
        # Operator
        self.wanted_since: float | None = None
        self.held = False

    def configure(self, config: Config, model: conf.Model, launch: conf.Launch, running: Iterable[str] = ()) -> None:
        """Apply its configuration. ``running``: the names of its servers that run at the moment."""
        self.launch = launch
        self.specs = launches_of(config, model)
        wanted = frozenset(spec.name for spec in self.specs)
        self.surplus = frozenset(running) - wanted
        self.names = wanted | self.surplus
        self.model_names = (model.id, *(lora.id for lora in model.loras))
        self._resources = exclusive_resources(launch) | (self._resources if running else frozenset())
        self._capacity = next((group.max_running for group in config.groups if group.id == launch.group), 1)
        self.drain_timeout = config.server.drain
        if self.removed:
            self.removed = self.held = False

    def remove(self) -> None:
        """Mark it as removed from the configuration. Its requests may finish, without a time limit."""
        self.removed = self.held = True
        self.wanted_since, self.drain_timeout = None, math.inf

    def surplus_stopped(self) -> None:
        """Record that only servers of the configuration are left."""
        self.names -= self.surplus
        self.out_of_rotation &= self.names
        self.surplus = frozenset()
        self._resources = exclusive_resources(self.launch)

    def record_use(self, served: float, in_flight: float, now: float) -> None:
        """Record how many of its requests have finished so far, and how many are in flight."""
        if served != self._served or in_flight:
            self._served, self.last_used = served, now

    def observe(self, statuses: Iterable[LaunchStatus], now: float) -> None:
        """Update its phase from the states of its servers."""
        states = {status.name: status.state for status in statuses if status.name in self.names}
        counted = {state for name, state in states.items() if name not in self.out_of_rotation and name not in self.surplus}
        phase = self.step or _phase(counted, bool(states))
        if phase is self.phase:
            return
        if phase is ModelPhase.READY:
            self.wanted_since, self._was_ready = None, True
            if self.phase is not ModelPhase.DRAINING:
                self.ready_since = now
            if self.started_at is not None:
                self.start_times.append(now - self.started_at)
        if phase in (ModelPhase.READY, ModelPhase.FAILED):
            self.started_at = None
        self.phase, self.since = phase, now

    def view(self, *, requested_since: float | None, in_flight: int, acknowledged: bool) -> ModelView:
        """Return its view for the scheduler. ``requested_since``: the time since which requests wait for it."""
        launch, sleeps = self.launch, self.launch.idle_sleep is not None
        is_awake_soon = self.step is ModelPhase.STARTING or self.phase in (ModelPhase.READY, ModelPhase.DRAINING, ModelPhase.SLEEPING)
        wake_seconds = max(self.wake_times, default=FIRST_WAKE)
        return ModelView(
            self.id,
            self.phase,
            since=self.since,
            needs=self._resources,
            group=launch.group,
            capacity=self._capacity,
            # A removed model shares no GPU by an operator's choice, so it never counts as fitting beside an eager one.
            on_demand=launch.start == "on_demand" or self.removed,
            wanted_since=min((since for since in (requested_since, self.wanted_since) if since is not None), default=None),
            in_flight=in_flight,
            drain_acknowledged=acknowledged,
            ready_since=self.ready_since,
            last_used=self.last_used,
            start_seconds=wake_seconds if sleeps and is_awake_soon else max(self.start_times, default=FIRST_START),
            stop_seconds=max(self.stop_times, default=FIRST_STOP),
            eager=launch.start == "eager" and (launch.idle_stop is None or not self._was_ready),
            sleeps=sleeps,
            idle_stop=launch.idle_stop,
            idle_sleep=launch.idle_sleep,
            held=self.held,
            drain_timeout=self.drain_timeout,
            in_transition=self.task is not None,
        )


def _phase(states: set[LaunchState], launched: bool) -> ModelPhase:
    """Return the phase for these states. ``launched``: the model has servers, even if no server counts."""
    if not launched:
        return ModelPhase.STOPPED
    if LaunchState.READY in states:
        return ModelPhase.READY
    if LaunchState.STARTING in states:
        return ModelPhase.STARTING
    return ModelPhase.FAILED if states - {LaunchState.STOPPING, LaunchState.STOPPED} else ModelPhase.DRAINING
