"""The models that the gateway launches: started, put to sleep, woken, drained and stopped, as requests and operators want it.

Owns the life of each model above that of its servers (``upstream/launcher``). What to do next is decided in one place,
``upstream/launcher/schedule.py``, from a picture of all; here the picture is drawn and the decision carried out. The
rule: with a model one thing is done at a time (handling.py).

Times are in seconds of the monotonic clock, which workers share; what operators see is wall clock.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.discovered_model import Found, comes, found_servers
from gateway.fleet.launch_diff import Reshape, can_roll, reshape, shape
from gateway.fleet.launched_model import Resident
from gateway.fleet.operations import RefusedOperation
from gateway.fleet.transitions import CLOSE_LOOK, Handling, Host, until
from gateway.telemetry.metrics import CounterSums
from gateway.worker.supervisor import WorkerSupervisor
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchSpec, LaunchState, LaunchStatus
from upstream.launcher.schedule import PARKED, ActionKind, ModelPhase, ModelView, compete, decide, forecast

_LOOK = 0.25  # seconds between two looks at the picture where nothing calls for one
_GATHER = 0.01  # seconds in which more may come that calls for the same look
_SHIFT = 1.0  # seconds by which the time of a model's coming may shift before workers are told
_COUNTED = {"requests_total": 0, "inflight_requests": 0, "queued_requests": 0, "server_inflight": 1}
_USE = ("requests_total", "inflight_requests")
_log = logging.getLogger("vllm_gateway.fleet")


@dataclass(frozen=True, slots=True)
class Standing:
    """A model as operators see it. ``since``: wall clock; ``waiting``: seconds for which the oldest of ``queued`` requests has waited."""

    state: ModelPhase
    since: float
    queued: int
    waiting: float | None


class Fleet:
    """Every model of the configuration; those that are launched here it brings up and down."""

    def __init__(self, config: Config, launcher: Launcher, workers: WorkerSupervisor, host: Host) -> None:
        self._launcher = launcher
        self._workers = workers
        self._host = host
        self._tally = CounterSums(workers.boards, _COUNTED)
        self._handling = Handling(launcher, workers, host, self._in_flight)
        now = time.monotonic()
        self._residents = {model.id: Resident(config, model, model.launch, now) for model in config.models if model.launch is not None}
        self._found = {model.id: Found(servers, ModelPhase.STARTING, now, comes(model)) for model, servers in found_servers(config)}
        self._index()
        self._told: Mapping[str, float] = {}
        self._nudged = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._does: Mapping[ActionKind, Callable[[Resident], None]] = {
            ActionKind.START: self._start,
            ActionKind.WAKE: self._wake,
            ActionKind.DRAIN: self._drain,
            ActionKind.RESUME: self._resume,
            ActionKind.SLEEP: self._put_to_sleep,
            ActionKind.STOP: self._stop,
        }

    def _index(self) -> None:
        self._by_server = {name: resident for resident in self._residents.values() for name in resident.names}

    # Another configuration

    def take(self, config: Config) -> None:
        """Follow another configuration. What it says of a model that runs is begun with the next look."""
        now, launched = time.monotonic(), {model.id: (model, model.launch) for model in config.models if model.launch is not None}
        before, self._residents = self._residents, {}
        for identity, (model, launch) in launched.items():
            resident = before.pop(identity, None)
            if resident is not None:
                self._follow(resident, config, model, launch)
            self._residents[identity] = resident or Resident(config, model, launch, now)
        for resident in before.values():
            resident.dismiss()
            self._break_off(resident)
        self._residents |= before
        self._index()
        self.find(config)

    def find(self, config: Config) -> None:
        """Follow a configuration that differs in nothing but the servers that were found."""
        now = time.monotonic()
        known, self._found = self._found, {}
        for model, servers in found_servers(config):
            one = self._found[model.id] = known.get(model.id) or Found(servers, ModelPhase.STARTING, now, comes(model))
            one.servers, one.comes = servers, comes(model)

    def _follow(self, resident: Resident, config: Config, model: conf.Model, launch: conf.Launch) -> None:
        before, was_gone = shape(resident.specs), resident.gone
        running = resident.names & self._launcher.specs.keys()
        resident.follow(config, model, launch, running)
        for spec in resident.specs:
            if spec.name in running:
                self._launcher.set_startup_timeout(spec.name, spec.startup_timeout)
        if was_gone or shape(resident.specs) != before:
            self._break_off(resident)

    def _break_off(self, resident: Resident) -> None:
        """If its servers are being replaced, that is no longer wanted: the next look begins anew from what there is."""
        if resident.task is not None and resident.step is None and not resident.ending:
            resident.task.cancel()

    def _reconsider(self, resident: Resident) -> None:
        """See whether its servers are those of the configuration; each change is tried once."""
        if resident.held or resident.task is not None or resident.step not in (None, ModelPhase.SLEEPING):
            return
        wanted = shape(resident.specs)
        if wanted == resident.tried:
            return
        running = [spec for name, spec in self._launcher.specs.items() if name in resident.names]
        change, resident.tried = reshape(running, resident.specs), wanted
        if not running or not change:
            resident.settled()
        elif resident.phase is ModelPhase.SLEEPING or not self._is_up(running):
            self._stop(resident)
        elif can_roll(running, change) and not self._is_crowded(resident, running, change):
            self._spawn(resident, self._handling.reshape(resident, change))
        else:
            self._spawn(resident, self._handling.begin_anew(resident))

    def _is_up(self, running: Iterable[LaunchSpec]) -> bool:
        """Whether one of these may have requests under way, be it one that the configuration no longer has."""
        names = {spec.name for spec in running}
        return any(status.state is LaunchState.READY for status in self._launcher.statuses() if status.name in names)

    def _is_crowded(self, resident: Resident, running: Iterable[LaunchSpec], change: Reshape) -> bool:
        """Whether the change needs GPUs that another model has and would have to leave."""
        had = {gpu for spec in running for gpu in spec.settings.gpus}
        more = frozenset(gpu for spec in (*change.renew, *change.add) for gpu in spec.settings.gpus if gpu not in had)
        wanting = replace(self._view(resident), needs=more, group=None)
        others = (self._view(other) for other in self._residents.values() if other.phase not in PARKED)
        return any(compete(wanting, other) for other in others)

    # The loop

    async def run(self) -> None:
        """Look and act until cancelled; what is being done then is left where it is."""
        try:
            while True:
                self._nudged.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._nudged.wait()
                await asyncio.sleep(_GATHER)
                self._look_again()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pause(self) -> float:
        return CLOSE_LOOK if any(resident.step is ModelPhase.DRAINING for resident in self._residents.values()) else _LOOK

    def nudge(self) -> None:
        """Something has changed that may call for a look."""
        self._nudged.set()

    def _look_again(self) -> None:
        try:
            self.look()
        except Exception:  # noqa: BLE001  the outer edge: the models stay as they are until the next look
            _log.exception("a look at the models")

    def look(self) -> None:
        """Draw the picture, decide, begin."""
        now = time.monotonic()
        self._see(now)
        self._let_go()
        for resident in self._residents.values():
            self._reconsider(resident)
        for action in decide([self._view(resident) for resident in self._residents.values()], now):
            self._host.acts(action)
            self._does[action.kind](self._residents[action.model])
        if self._has_shifted(self.expected()):
            self._host.tell_health()

    def changed(self, status: LaunchStatus) -> None:
        """A launched server has changed its state."""
        resident = self._by_server.get(status.name)
        if (
            resident is not None
            and resident.step is ModelPhase.SLEEPING
            and resident.task is None
            and status.state is not LaunchState.READY
        ):
            self._stop(resident)  # it is being started again, awake, where another model may run
        self.nudge()

    def _let_go(self) -> None:
        """Forget the models that the configuration no longer has, once nothing of them is left."""
        left = [one.id for one in self._residents.values() if one.gone and one.task is None and one.phase is ModelPhase.STOPPED]
        for identity in left:
            del self._residents[identity]
        if left:
            self._index()

    # The picture

    def _see(self, now: float) -> None:
        statuses = self._launcher.statuses()
        for resident in self._residents.values():
            counted = {family: sum(self._tally.sum(family, name) for name in resident.asked_as) for family in _USE}
            resident.used(counted["requests_total"], counted["inflight_requests"], now)
            resident.see(statuses, now)
        conditions, awaited = (self._host.conditions(), self._host.awaited()) if self._found else ({}, frozenset[str]())
        for model, found in self._found.items():
            found.see((conditions[name] for name in found.servers), model in awaited, now)

    def _view(self, resident: Resident) -> ModelView:
        return resident.view(
            asked=self._workers.requested_since(resident.id),
            in_flight=self._in_flight(resident.names),
            acknowledged=self._workers.have_applied(resident.told),
        )

    def _in_flight(self, servers: Iterable[str]) -> int:
        return int(sum(self._tally.sum("server_inflight", name) for name in servers))

    def away(self) -> frozenset[str]:
        """The launched servers that are to get no requests: stopped, asleep, or draining."""
        launched = {status.name for status in self._launcher.statuses()}
        whole = (resident.names if resident.step is not None else resident.away for resident in self._residents.values())
        return frozenset().union(*whole, self._by_server.keys() - launched)

    def expected(self) -> Mapping[str, float]:
        """When each model may be up that is not, and that is worth waiting for."""
        now = time.monotonic()
        self._see(now)
        launched = forecast([self._view(resident) for resident in self._residents.values()], now)
        return launched | {model: when for model, found in self._found.items() if (when := found.expected) is not None}

    def telling(self) -> Mapping[str, float]:
        """``expected``, for workers: from now on they are told again only when it has shifted."""
        self._told = self.expected()
        return self._told

    def _has_shifted(self, expected: Mapping[str, float]) -> bool:
        return expected.keys() != self._told.keys() or any(abs(when - self._told[model]) > _SHIFT for model, when in expected.items())

    def phase(self, model: str) -> ModelPhase:
        """Where a model is in its life."""
        return (self._found.get(model) or self._residents[model]).phase

    def standing(self, model: str) -> Standing:
        """A model as operators see it."""
        now = time.monotonic()
        one = self._found.get(model) or self._residents[model]
        queued, asked = int(self._tally.sum("queued_requests", model)), self._workers.requested_since(model)
        waiting = now - asked if queued and asked is not None else None
        return Standing(one.phase, time.time() - (now - one.since), queued, waiting)

    # What is begun

    def _start(self, resident: Resident) -> None:
        resident.started(time.monotonic())
        for spec in resident.specs:
            self._launcher.start(spec)

    def _drain(self, resident: Resident) -> None:
        resident.step = ModelPhase.DRAINING
        resident.told = self._host.tell_health()

    def _resume(self, resident: Resident) -> None:
        resident.step = None
        self._host.tell_health()

    def _stop(self, resident: Resident) -> None:
        resident.step = ModelPhase.DRAINING
        resident.ending = True
        self._spawn(resident, self._handling.end(resident))

    def _put_to_sleep(self, resident: Resident) -> None:
        self._spawn(resident, self._handling.lull(resident))

    def _wake(self, resident: Resident) -> None:
        resident.step = ModelPhase.STARTING
        self._spawn(resident, self._handling.rouse(resident))

    def _spawn(self, resident: Resident, work: Coroutine[Any, Any, None]) -> None:
        task = resident.task = asyncio.create_task(_told(resident, work), name=f"fleet {resident.id}")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._over, resident, work))

    def _over(self, resident: Resident, work: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
        """The next look sees what has become of it. A task may also be over before its first step, and its work never begun."""
        work.close()
        self._tasks.discard(task)
        resident.task, resident.ending = None, False
        if task.cancelled():
            resident.tried = {}  # it may have been replacing servers: what of that is left to do is still to be done
        if resident.away:
            resident.away.clear()
            self._host.tell_health()
        self.nudge()

    # What operators ask for

    async def start(self, model: str) -> None:
        """Have a model brought up, and no longer held down; returns when that has begun and requests wait for it.

        Raises RefusedOperation.
        """
        resident = self._resident(model)
        resident.held = False
        if resident.phase is ModelPhase.FAILED and resident.task is None:
            self._stop(resident)
        if resident.phase is not ModelPhase.READY and resident.phase is not ModelPhase.STARTING:
            resident.ordered = time.monotonic()
        self.look()
        await self._workers.wait_applied(self._host.tell_health())

    async def wake(self, model: str) -> None:
        """Have a model woken as a request would, but also one that is held down. Raises RefusedOperation."""
        await self.start(model)

    async def stop(self, model: str) -> None:
        """Let a model's requests finish, end its servers, and hold it down until ``start`` or ``wake``; returns when it is down.

        Raises RefusedOperation.
        """
        resident = self._resident(model)
        if resident.task is not None and not resident.ending:
            resident.task.cancel()
            await asyncio.gather(resident.task, return_exceptions=True)
        resident.held, resident.ordered = True, None
        self.look()
        await until(lambda: resident.phase is ModelPhase.STOPPED or not resident.held)

    async def restart(self, model: str) -> None:
        """Have a model's servers replaced, one after the other; returns when the first one gets no more requests.

        Raises RefusedOperation.
        """
        resident = self._resident(model)
        if resident.task is not None and not resident.ending:
            raise RefusedOperation(f"{model} is being worked on; try again when it is ready, or stop it")
        if resident.phase in (ModelPhase.STOPPED, ModelPhase.SLEEPING, ModelPhase.DRAINING):
            raise RefusedOperation(f"{model} is {resident.phase}; only a model that runs can be restarted")
        specs = self._handling.in_turn(resident.specs)
        number = self._handling.set_aside(resident, [specs[0].name])
        self._spawn(resident, self._handling.roll(resident, specs))
        await self._workers.wait_applied(number)

    def _resident(self, model: str) -> Resident:
        resident = self._residents.get(model)
        if resident is None or resident.gone:
            raise RefusedOperation(f"{model} is not launched by the gateway" if model in self._found else f"there is no model {model}")
        return resident


async def _told(resident: Resident, work: Coroutine[Any, Any, None]) -> None:
    """The outer edge of what is done with a model: whoever operates it reads what went wrong."""
    try:
        await work
    except RefusedOperation as error:
        _log.error("%s: %s", resident.id, error)
    except Exception:  # noqa: BLE001  it is logged, and the next look goes on from what there is
        _log.exception("%s", resident.id)
