"""The life cycle of the models: launched models are started, put to sleep, woken, drained and stopped on demand or on request.

Owns the life cycle of each model. The life cycle of its servers belongs to ``upstream/launcher``. Each pass observes all models, computes
the actions (``upstream/launcher/schedule.py``) and starts them. The rule: a model is in one transition at a time (``transitions``).

Times are in seconds of the monotonic clock, which workers share. Operators see wall clock.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import InitVar, dataclass, replace
from typing import Any

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.discovered_model import ExternalModel, external_servers, may_wait
from gateway.fleet.launch_diff import LaunchDiff, can_replace_one_at_a_time, comparable, launch_diff
from gateway.fleet.launched_model import LaunchedModel
from gateway.fleet.operations import RefusedOperation
from gateway.fleet.transitions import POLL_INTERVAL, Rotation, Transitions
from gateway.system.tasks import cancel, wait_at_most, wait_until
from gateway.telemetry.metrics import CounterSums
from gateway.worker.supervisor import WorkerSupervisor
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchSpec, LaunchState, LaunchStatus
from upstream.launcher.schedule import NOT_RUNNING, Action, ActionKind, ModelPhase, ModelView, compete, decide, forecast

_PASS_INTERVAL = 0.25  # seconds between two passes without a reason
_GATHER = 0.01  # seconds in which further reasons join the same pass
_MIN_SHIFT = 1.0  # seconds by which a model's expected time must change before the workers are notified
_COUNTED = {"requests_total": 0, "inflight_requests": 0, "queued_requests": 0, "server_inflight": 1}
_USE = ("requests_total", "inflight_requests")
_log = logging.getLogger("vllm_gateway.fleet")


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as operators see it. ``since`` is wall clock. ``waiting`` is the age of the oldest of ``queued`` requests, in seconds.

    ``is_held``: an operator has stopped it.
    """

    state: ModelPhase
    since: float
    queued: int
    waiting: float | None
    is_held: bool


@dataclass(eq=False)
class Fleet:
    """Every model of the configuration. Launched models are started and stopped here.

    ``undiscovered`` returns the models whose discovery has had no result yet. ``on_action`` is called with each action that is started.
    """

    config: InitVar[Config]
    _launcher: Launcher
    _rotation: Rotation
    _workers: WorkerSupervisor
    _undiscovered: Callable[[], Set[str]]
    _on_action: Callable[[Action], None]

    def __post_init__(self, config: Config) -> None:
        self._tally = CounterSums(self._workers.boards, _COUNTED)
        self._transitions = Transitions(self._launcher, self._rotation, self._workers, self._in_flight)
        self._launched: dict[str, LaunchedModel] = {}
        self._external: dict[str, ExternalModel] = {}
        self.apply_config(config)
        self._published: Mapping[str, float] = {}
        self._pass_due = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starters: Mapping[ActionKind, Callable[[LaunchedModel], None]] = {
            ActionKind.START: self._start,
            ActionKind.WAKE: self._wake,
            ActionKind.DRAIN: self._drain,
            ActionKind.RESUME: self._resume,
            ActionKind.SLEEP: self._sleep,
            ActionKind.STOP: self._stop,
        }

    def _index(self) -> None:
        self._by_server = {name: model for model in self._launched.values() for name in model.names}

    # Another configuration

    def apply_config(self, config: Config) -> None:
        """Apply another configuration. The next pass starts the changes to running models."""
        now = time.monotonic()
        before, self._launched = self._launched, {}
        for model in config.models:
            if model.launch is None:
                continue
            if (known := before.pop(model.id, None)) is not None:
                self._configure(known, config, model, model.launch)
            self._launched[model.id] = known or LaunchedModel(config, model, model.launch, now)
        for removed in before.values():
            removed.remove()
            self._cancel_replacement(removed)
        self._launched |= before
        self._index()
        self.apply_discovered(config)

    def apply_discovered(self, config: Config) -> None:
        """Apply a configuration that differs only in its discovered servers."""
        now = time.monotonic()
        known, self._external = self._external, {}
        for model, servers in external_servers(config):
            entry = self._external[model.id] = known.get(model.id) or ExternalModel(servers, ModelPhase.STARTING, now, may_wait(model))
            entry.servers, entry.may_wait = servers, may_wait(model)

    def _configure(self, known: LaunchedModel, config: Config, model: conf.Model, launch: conf.Launch) -> None:
        before, was_removed = comparable(known.specs), known.removed
        running = known.names & self._launcher.servers.keys()
        known.configure(config, model, launch, running)
        for spec in known.specs:
            if spec.name in running:
                self._launcher.servers[spec.name].set_startup_timeout(spec.startup_timeout)
        if was_removed or comparable(known.specs) != before:
            self._cancel_replacement(known)

    def _cancel_replacement(self, model: LaunchedModel) -> None:
        """Cancel a replacement of its servers that is no longer wanted. The next pass continues from the servers that exist."""
        if model.task is not None and model.step is None and not model.stopping:
            model.task.cancel()

    def _apply_launch_changes(self, model: LaunchedModel) -> None:
        """Start to change the model's servers to match the configuration. Each change is tried once."""
        if model.held or model.task is not None or model.step not in (None, ModelPhase.SLEEPING):
            return
        wanted = comparable(model.specs)
        if wanted == model.tried:
            return
        running = [server.spec for name, server in self._launcher.servers.items() if name in model.names]
        diff, model.tried = launch_diff(running, model.specs), wanted
        if not running or not diff:
            model.surplus_stopped()
        elif model.phase is ModelPhase.SLEEPING or not self._is_any_ready(running):
            self._stop(model)  # nothing can be in flight
        elif can_replace_one_at_a_time(running, diff) and not self._needs_gpus_of_others(model, running, diff):
            self._spawn(model, self._transitions.apply_diff(model, diff))
        else:
            self._spawn(model, self._transitions.stop_when_drained(model))

    def _is_any_ready(self, running: Iterable[LaunchSpec]) -> bool:
        """Return whether any of these servers may have requests in flight, including servers that were removed from the configuration."""
        names = {spec.name for spec in running}
        return any(status.state is LaunchState.READY for status in self._launcher.statuses() if status.name in names)

    def _needs_gpus_of_others(self, model: LaunchedModel, running: Iterable[LaunchSpec], diff: LaunchDiff) -> bool:
        """Return whether the change needs GPUs that another running model has."""
        had = {gpu for spec in running for gpu in spec.settings.gpus}
        more = frozenset(gpu for spec in (*diff.replaced, *diff.added) for gpu in spec.settings.gpus if gpu not in had)
        wanting = replace(self._view(model), needs=more, group=None)
        others = (self._view(other) for other in self._launched.values() if other.phase not in NOT_RUNNING)
        return any(compete(wanting, other) for other in others)

    # Passes

    async def run(self) -> None:
        """Run passes until cancelled. Running transitions are not continued then."""
        try:
            while True:
                self._pass_due.clear()
                is_draining = any(model.step is ModelPhase.DRAINING for model in self._launched.values())
                await wait_at_most(POLL_INTERVAL if is_draining else _PASS_INTERVAL, self._pass_due.wait())
                await asyncio.sleep(_GATHER)
                try:
                    self.run_pass()
                except Exception:  # noqa: BLE001  the outer edge: the models stay as they are until the next pass
                    _log.exception("a pass over the models failed")
        finally:
            await cancel(*self._tasks)

    def request_pass(self) -> None:
        """Run a pass soon, because something has changed."""
        self._pass_due.set()

    def run_pass(self) -> None:
        """Observe the models, compute the actions, and start them."""
        now = time.monotonic()
        self._observe(now)
        self._forget_removed()
        for model in self._launched.values():
            self._apply_launch_changes(model)
        for action in decide([self._view(model) for model in self._launched.values()], now):
            self._on_action(action)
            self._starters[action.kind](self._launched[action.model])
        if self._has_shifted(self.expected()):
            self._rotation.publish_health()

    def server_changed(self, status: LaunchStatus) -> None:
        """Handle a change in the state of a launched server."""
        model = self._by_server.get(status.name)
        if model is not None and model.step is ModelPhase.SLEEPING and model.task is None and status.state is not LaunchState.READY:
            self._stop(model)  # the launcher restarts it awake, on GPUs that another model may have
        self.request_pass()

    def _forget_removed(self) -> None:
        """Forget stopped models that are no longer in the configuration."""
        done = [model.id for model in self._launched.values() if model.removed and model.task is None and model.phase is ModelPhase.STOPPED]
        for identity in done:
            del self._launched[identity]
        if done:
            self._index()

    # Observation

    def _observe(self, now: float) -> None:
        statuses = self._launcher.statuses()
        for model in self._launched.values():
            counts = {family: sum(self._tally.sum(family, name) for name in model.model_names) for family in _USE}
            model.record_use(counts["requests_total"], counts["inflight_requests"], now)
            model.observe(statuses, now)
        if self._external:
            conditions, undiscovered = self._rotation.conditions(), self._undiscovered()
            for identity, external in self._external.items():
                external.observe((conditions[name] for name in external.servers), identity in undiscovered, now)

    def _view(self, model: LaunchedModel) -> ModelView:
        return model.view(
            requested_since=self._workers.requested_since(model.id),
            in_flight=self._in_flight(model.names),
            acknowledged=self._workers.have_applied(model.drain_number),
        )

    def _in_flight(self, servers: Iterable[str]) -> int:
        return int(sum(self._tally.sum("server_inflight", name) for name in servers))

    def out_of_rotation(self) -> frozenset[str]:
        """Return the launched servers that get no requests: stopped, asleep or draining."""
        names = (model.names if model.step is not None else model.out_of_rotation for model in self._launched.values())
        return frozenset().union(*names, self._by_server.keys() - self._launcher.servers.keys())

    def expected(self) -> Mapping[str, float]:
        """Return when each model that is down may be up, for the models that are worth waiting for."""
        now = time.monotonic()
        self._observe(now)
        launched = forecast([self._view(model) for model in self._launched.values()], now)
        return launched | {model: when for model, external in self._external.items() if (when := external.expected) is not None}

    def expected_to_publish(self) -> Mapping[str, float]:
        """Return ``expected`` for the workers. They get it again only when it has shifted."""
        self._published = self.expected()
        return self._published

    def _has_shifted(self, expected: Mapping[str, float]) -> bool:
        before = self._published
        return expected.keys() != before.keys() or any(abs(when - before[model]) > _MIN_SHIFT for model, when in expected.items())

    def phase(self, model: str) -> ModelPhase:
        """Return the phase of a model."""
        return (self._external.get(model) or self._launched[model]).phase

    def status(self, model: str) -> ModelStatus:
        """Return a model as operators see it."""
        now = time.monotonic()
        known = self._external.get(model) or self._launched[model]
        queued, requested = int(self._tally.sum("queued_requests", model)), self._workers.requested_since(model)
        waiting = now - requested if queued and requested is not None else None
        is_held = model in self._launched and self._launched[model].held
        return ModelStatus(known.phase, time.time() - (now - known.since), queued, waiting, is_held)

    # Actions

    def _start(self, model: LaunchedModel) -> None:
        model.started_at = time.monotonic()
        for spec in model.specs:
            self._launcher.start(spec)

    def _drain(self, model: LaunchedModel) -> None:
        model.step = ModelPhase.DRAINING
        model.drain_number = self._rotation.publish_health()

    def _resume(self, model: LaunchedModel) -> None:
        model.step = None
        self._rotation.publish_health()

    def _stop(self, model: LaunchedModel) -> None:
        model.step = ModelPhase.DRAINING
        model.stopping = True
        self._spawn(model, self._transitions.stop(model))

    def _sleep(self, model: LaunchedModel) -> None:
        self._spawn(model, self._transitions.sleep(model))

    def _wake(self, model: LaunchedModel) -> None:
        model.step = ModelPhase.STARTING
        self._spawn(model, self._transitions.wake(model))

    def _spawn(self, model: LaunchedModel, transition: Coroutine[Any, Any, None]) -> None:
        task = model.task = asyncio.create_task(_logged(model, transition), name=f"fleet {model.id}")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._finished, model, transition))

    def _finished(self, model: LaunchedModel, transition: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
        """Clear a finished transition. A task may end before its first step, and its coroutine was then never started."""
        transition.close()
        self._tasks.discard(task)
        model.task, model.stopping = None, False
        if task.cancelled():
            model.tried = {}  # it may have been replacing servers, and the rest is still to be replaced
        if model.out_of_rotation:
            model.out_of_rotation.clear()
            self._rotation.publish_health()
        self.request_pass()

    # Operations, each of which may raise RefusedOperation

    async def start(self, model: str) -> None:
        """Start a model, and cancel an earlier ``stop``. Returns once the start has begun and requests wait for it."""
        known = self._find(model)
        known.held = False
        if known.phase is ModelPhase.FAILED and known.task is None:
            self._stop(known)
        if known.phase is not ModelPhase.READY and known.phase is not ModelPhase.STARTING:
            known.wanted_since = time.monotonic()
        self.run_pass()
        await self._workers.wait_applied(self._rotation.publish_health())

    async def stop(self, model: str) -> None:
        """Drain and stop a model, and keep it stopped until ``start`` or ``wake``. Returns when it is stopped."""
        known = self._find(model)
        if known.task is not None and not known.stopping:
            await cancel(known.task)
        known.held, known.wanted_since = True, None
        self.run_pass()
        await wait_until(lambda: known.phase is ModelPhase.STOPPED or not known.held, POLL_INTERVAL)

    async def restart(self, model: str) -> None:
        """Replace a model's servers, one at a time. Returns when the first server is out of rotation."""
        known = self._find(model)
        if known.task is not None and not known.stopping:
            raise RefusedOperation(f"{model} is in a transition; try again when it is ready, or stop it")
        if known.phase in (ModelPhase.STOPPED, ModelPhase.SLEEPING, ModelPhase.DRAINING):
            raise RefusedOperation(f"{model} is {known.phase}; only a running model can be restarted")
        specs = self._transitions.down_first(known.specs)
        number = self._transitions.take_out_of_rotation(known, [specs[0].name])
        self._spawn(known, self._transitions.replace(known, specs))
        await self._workers.wait_applied(number)

    def _find(self, model: str) -> LaunchedModel:
        known = self._launched.get(model)
        if known is None or known.removed:
            raise RefusedOperation(f"{model} is not launched by the gateway" if model in self._external else f"there is no model {model}")
        return known


async def _logged(model: LaunchedModel, transition: Coroutine[Any, Any, None]) -> None:
    """Run a transition, and log its failure for the operator: the outer edge of a transition."""
    try:
        await transition
    except RefusedOperation as error:
        _log.error("%s: %s", model.id, error)
    except Exception:  # noqa: BLE001  it is logged, and the next pass continues from the servers that exist
        _log.exception("%s", model.id)
