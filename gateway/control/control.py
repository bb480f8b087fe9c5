"""What the control process knows, and whom it tells: launcher, prober and sources tell it of servers, and it tells the workers.

It never touches a client's bytes. The rule: workers learn of servers, models and keys from here alone, so what they serve by is
what is known at one moment, under one number.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from gateway import config as conf
from gateway.admin.status_view import counted
from gateway.config import Config
from gateway.control.discovery import Change, Discovery, changes, discovered
from gateway.control.jwks_fetch import KeySets
from gateway.control.reload import History, Reloader
from gateway.control.startup_messages import Announcer
from gateway.fleet import plan
from gateway.fleet.fleet import Fleet
from gateway.fleet.operations import Reading, RefusedOperation
from gateway.fleet.transitions import STOP_GRACE
from gateway.snapshot.link import Health
from gateway.system import logs
from gateway.system.service_manager import ServiceManager
from gateway.telemetry.dependencies import Dependencies, Observation
from gateway.telemetry.metrics import tokens_by_model
from gateway.telemetry.token_rates import TokenRates
from gateway.worker.supervisor import WorkerSupervisor
from upstream.balancing.server import Condition
from upstream.discovery import EndpointState
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.launcher.schedule import Action, ModelPhase
from upstream.vllm.health import Prober, ServerHealth

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger

_LOOK_EVERY = 1.0  # seconds between two looks at the counts of tokens
_AT_REST = frozenset({ModelPhase.STOPPED, ModelPhase.SLEEPING, ModelPhase.DRAINING})
_ENDING = 30.0  # seconds for what has no other bound of its own on the way down


def speak_by(config: Config) -> None:
    """Have standard error written to as the configuration says."""
    logs.configure(plan.log_settings(config), "control")


class Control:
    """What control knows, and whom it tells. The ``Operations`` of the admin port and socket."""

    launcher: Launcher
    prober: Prober
    workers: WorkerSupervisor
    fleet: Fleet
    discovery: Discovery
    reloader: Reloader
    key_sets: KeySets
    asked: asyncio.Queue[int]
    """Whatever is put in asks for the end."""
    ledger: Ledger | None = None
    acquaint_within = 0.3
    """Seconds in which a server that a new configuration brings may answer its first probe."""

    def __init__(self, config: Config, announcer: Announcer, manager: ServiceManager | None = None) -> None:
        self._read = config
        self.config = config  # as it was read, with the servers that were found
        self.announcer = announcer
        self.manager = manager or ServiceManager(None, None)
        self.lasting: list[asyncio.Task[None]] = []  # what works as long as the gateway serves
        self.history = History()
        self.started = time.time()
        self._awaited = {place.name for place in plan.places(config)} | {model.id for model, _ in discovered(config)}
        self._awaited |= {issuer.issuer for issuer in config.jwt}
        self._opening: int | None = None  # the first word to the workers that tells of all of these
        self._opened = False  # and all of them have heard it
        self._leaving = False  # no more requests should come
        self._draining = False  # and no more are served
        self.version = 0  # of what workers were told last
        self._news = False  # the workers are about to be told of probes
        self.launches: dict[tuple[str, str], int] = {}
        self.launch_failures: Counter[tuple[str, str]] = Counter()
        """By model and by the code of the cause."""
        self._expect_launches()
        self._stages: dict[str, LaunchState] = {}
        self._conditions: Mapping[str, Condition] = {}
        self.changed_at: Mapping[str, float] = {}
        """Since when each server is in its condition, in seconds since the epoch."""
        self.rates = TokenRates()
        self.dependencies = Dependencies()

    # Starting and stopping

    def begin(self) -> None:
        """Look for servers, launch, probe, and have the workers serve."""
        self.discovery.look_for(self.config)
        self.key_sets.want(self.config)
        self.fleet.look()
        self.configure()
        self._watch_servers()

    def leave(self) -> None:
        """Say that no more requests should come."""
        self._leaving = True
        self.workers.stop_keep_alive()
        self.manager.stopping(self.config.server.linger + self.config.server.drain + STOP_GRACE + _ENDING)

    async def end(self) -> None:
        """Let clients finish, then end the servers."""
        self._leaving = self._draining = True
        await self.workers.drain(self.config.server.drain)
        names = [status.name for status in self.launcher.statuses()]
        await asyncio.gather(*(self.launcher.stop(name, STOP_GRACE) for name in names))

    async def report_progress(self) -> None:
        """Tell the operator how the servers come up, until all have."""
        while waiting := self._look_for_results():
            self.announcer.waiting(waiting, time.time() - self.started, self._last_line)
            await asyncio.sleep(self.announcer.interval)
        await self.taken(self.tell_health())
        self.announcer.serving(self._up(), self._expected_up())

    def _last_line(self, name: str) -> str:
        status = self.known.launched.get(name)
        return status.progress if status else ""

    def _up(self) -> int:
        return sum(condition is Condition.UP for condition in plan.conditions(self.config, self.known).values())

    def _expected_up(self) -> int:
        away = self.fleet.away()
        return sum(place.name not in away for place in plan.places(self.config))

    async def watch_tokens(self) -> None:
        """Look at the counts of tokens and at dependencies, again and again."""
        while True:
            self.rates.observe(time.monotonic(), tokens_by_model(self.workers.boards))
            self.observe_dependencies()
            logs.tell(time.monotonic())
            await asyncio.sleep(_LOOK_EVERY)

    def observe_dependencies(self) -> Dependencies:
        """What the gateway depends on, as it is at this moment."""
        self.dependencies.observe(self._observed_dependencies(), time.time())
        return self.dependencies

    def _observed_dependencies(self) -> Iterator[Observation]:
        store = self.workers.store_status()
        if store is not None:
            yield Observation("limits_store", error=store.error)
        if self.ledger is not None:
            yield from self.ledger.dependencies()
        yield from self.key_sets.dependencies()
        yield from self.discovery.dependencies(self.config)

    # What the service manager is told

    def broken(self) -> str | None:
        """What has stopped working and will not work again by itself; None while all is well."""
        ended = next((task for task in self.lasting if task.done()), None)
        return self.workers.failure(time.monotonic()) if ended is None else f"{ended.get_name()} has ended"

    def headline(self) -> str:
        """How the gateway is, in a line."""
        well = f"{self._up()} of {self._expected_up()} servers up"
        wrong = "" if self.history.last.successful else "; the configuration that was read last cannot be used"
        down = "".join(f"; {name} is down" for name in self.dependencies.down())
        return f"{self.broken() or self.not_ready() or well}{down}{wrong}"

    # Another configuration

    def reading(self) -> AbstractContextManager[None]:
        """Have the service manager know of a reading."""
        return self.manager.reloading()

    async def acquaint(self, config: Config) -> None:
        """Find and probe the servers that a configuration brings, so that a model that moves to others is up there when it does."""
        self.discovery.look_for(self._read, config)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.acquaint_within):
                while not self.discovery.has_answers(config):  # noqa: ASYNC110  # what is waited for is on the network
                    await asyncio.sleep(0.01)
                await self._probe_new_ones(self.discovery.fill(config))

    async def _probe_new_ones(self, config: Config) -> None:
        known = self.known
        targets = plan.targets(config, known)
        new = {target.name for target in targets} - {place.name for place in plan.places(self.config)}
        if new:
            self.prober.set_targets((*plan.targets(self.config, known), *targets))
            while not new <= self.known.probes.keys():  # noqa: ASYNC110  # what is waited for is on the network
                await asyncio.sleep(0.01)

    def take(self, config: Config) -> int:
        """Serve by another configuration; what it does not change is not touched. Returns the number of the word to the workers."""
        self._read = config
        self.discovery.look_for(config)
        self.key_sets.want(config)
        self.config = config = self.discovery.fill(config)
        self.discovery.serve(config)
        speak_by(config)
        self._expect_launches()
        self.fleet.take(config)
        number = self.configure()
        self._watch_servers()
        self.fleet.nudge()
        return number

    def found(self) -> None:
        """The sources tell of servers that have come, are about to go, or have gone."""
        if self._draining or not self.version:
            return
        filled = self.discovery.fill(self._read)
        self.discovery.serve(filled)
        if changed := tuple(changes(self.config, filled)):
            self._take_servers(filled, changed)
        self._watch_servers()
        self.fleet.nudge()

    def fetched(self) -> None:
        """An issuer's keys are others, or the first look at them is over."""
        if self.version and not self._draining:
            self.configure()

    def _take_servers(self, filled: Config, changed: Iterable[Change]) -> None:
        """Serve by a configuration that differs in nothing but the servers that were found."""
        self.config = filled
        for change in changed:
            self.announcer.found(change)
        self.fleet.find(filled)
        self.configure()

    async def taken(self, number: int) -> None:
        """Wait until every worker serves by what it was told under this number, within reason."""
        await self.workers.wait_applied(number)

    def read(self, reading: Reading) -> None:
        """Tell the operator of a reading of the files."""
        self.announcer.reloaded(reading)

    def _expect_launches(self) -> None:
        for model in self.config.models:
            if model.launch is not None:
                for outcome in ("ready", "failed"):
                    self.launches.setdefault((model.id, outcome), 0)

    # What is known

    @property
    def known(self) -> plan.Knowledge:
        statuses = plan.by_name(self.launcher.statuses())
        probes = {probe.name: probe for probe in self.prober.servers()}
        return plan.Knowledge(
            statuses,
            probes,
            {name: self.launcher.api_key(name) for name in statuses},
            self.fleet.away() | self.discovery.named(EndpointState.TERMINATING),
            self.discovery.named(EndpointState.UNREADY),
            self.discovery.awaited(self.config, probes),
            self.key_sets.known(),
        )

    def launched(self, status: LaunchStatus) -> None:
        """The launcher tells of a change."""
        before = self._stages.get(status.name)
        self._stages[status.name] = status.state
        if before is status.state:
            return
        if before is LaunchState.STARTING:
            self._count_launch(status)
        if status.state in (LaunchState.FAILED, LaunchState.CRASHED) and status.cause is not None:
            self.launch_failures[plan.launched_model(status.name), status.cause.code] += 1
        self.announcer.launched(status)
        if self.version and not self._draining:
            self.configure()
            self._watch_servers()
            self.fleet.changed(status)

    def _count_launch(self, status: LaunchStatus) -> None:
        outcome = {LaunchState.READY: "ready", LaunchState.FAILED: "failed"}.get(status.state)
        if outcome is not None:
            self.launches[plan.launched_model(status.name), outcome] += 1

    def probed(self, probe: ServerHealth) -> None:
        """The prober tells of a change."""
        stage = self._stages.get(probe.name)
        if stage not in (None, LaunchState.READY):
            return  # it has ended, or is being stopped: the launcher reports it
        if not (probe.up and stage is LaunchState.READY):  # the launcher has reported that it is up
            self.announcer.probed(probe)
        if not self._news:  # one look may tell of a thousand models
            self._news = True
            asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._news = False
        self.tell_health()
        self.fleet.nudge()

    def lost(self, probe: ServerHealth) -> None:
        """The prober tells of a server that will not come back by itself; one that was launched here is started anew."""
        if probe.name in self.known.launched:
            self.launcher.restart(probe.name, probe.reason, STOP_GRACE)

    def nudged(self) -> None:
        """A worker has said something."""
        if not self._draining:
            self.fleet.nudge()

    def configure(self) -> int:
        """Have the workers serve by the servers that there are now; returns the number of that word."""
        self.version += 1
        snapshot = plan.build_snapshot(self.config, self.known, self.version, int(self.started))
        return self._said(self.workers.apply_snapshot(snapshot, self._health()))

    def _watch_servers(self) -> None:
        self.prober.set_targets(plan.targets(self.config, self.known))
        self.tell_health()

    def tell_health(self) -> int:
        """Tell the workers what is known of servers and models; returns the number of that word."""
        return self._said(self.workers.apply_health(self._health()))

    def _said(self, number: int) -> int:
        if self._opening is None and not self._awaited:
            self._opening = number
        return number

    def _health(self) -> Health:
        self._look_for_results()
        known = self.known
        conditions = plan.conditions(self.config, known)
        self._date(conditions)
        return Health(conditions, plan.max_model_len(self.config, known), self.fleet.telling(), tasks=plan.tasks(self.config, known))

    def _date(self, conditions: Mapping[str, Condition]) -> None:
        """Note when each server has come into its condition; workers are told of every change."""
        now, before, self._conditions = time.time(), self._conditions, conditions
        self.changed_at = {name: self.changed_at[name] if before.get(name) is condition else now for name, condition in conditions.items()}

    def conditions(self) -> Mapping[str, Condition]:
        """What is known of every server."""
        return plan.conditions(self.config, self.known)

    def awaited(self) -> Set[str]:
        """The models whose servers are still looked for."""
        return self.known.awaited if self.discovery.waits(self.config) else frozenset()

    def acts(self, action: Action) -> None:
        """Tell the operator what is done."""
        self.announcer.acts(action)

    # What operators ask for; each raises RefusedOperation with words for them

    async def start(self, model: str) -> None:
        """Bring a model up, also one that was stopped by ``stop``."""
        self._refuse_at_the_end()
        await self.fleet.start(model)

    async def stop(self, model: str) -> None:
        """Let a model's requests finish, end its servers, and hold it down."""
        await self.fleet.stop(model)

    async def restart(self, model: str) -> None:
        """Begin to replace a model's servers, one after the other."""
        self._refuse_at_the_end()
        await self.fleet.restart(model)

    async def wake(self, model: str) -> None:
        """Wake a model as a request would."""
        self._refuse_at_the_end()
        await self.fleet.wake(model)

    async def reload(self) -> Reading:
        """Read the configuration again, and serve by it if it is good."""
        self._refuse_at_the_end()
        return await self.reloader.reload()

    async def drain(self) -> None:
        """Begin to stop."""
        self._refuse_at_the_end()
        self.leave()
        self.asked.put_nowait(signal.SIGTERM)

    def _refuse_at_the_end(self) -> None:
        """What is begun now would be ended in a moment."""
        if self._leaving:
            raise RefusedOperation("the gateway is stopping")

    # Whether it is ready

    def not_ready(self) -> str | None:
        """Why no traffic should come yet; None when it may."""
        if self._leaving:
            return "draining"
        if not any(status.up for status in self.workers.statuses):
            return "no worker is up"
        waiting = self._look_for_results()
        if waiting:
            return f"waiting for {', '.join(waiting)}"
        return None if self._have_heard() else "waiting for the workers to hear of their servers"

    def degraded(self) -> list[str]:
        """Why not all requests can be served as configured, though traffic may come; empty while all is well. Without any name that the
        configuration gives: what has no access to /status may read this."""
        ready, models = plan.ready_servers(self.config, self.known), self.config.models
        count = sum(not ready[model.id] and not self._rests(model) for model in models)
        without = [f"{count} of {counted(len(models), 'model')} without a ready server"] if count else []
        return without + [f"{name} is down" for name in self.observe_dependencies().down()]

    def _rests(self, model: conf.Model) -> bool:
        """Whether the gateway itself has taken a model's servers out of service, or is about to bring them back."""
        phase = self.fleet.phase(model.id)
        return phase in _AT_REST or (phase is ModelPhase.STARTING and plan.may_be_stopped(self.config, model))

    def _have_heard(self) -> bool:
        """Whether every worker knows what the first looks found; once it is so, a worker that is replaced changes nothing."""
        self._opened = self._opened or (self._opening is not None and self.workers.have_applied(self._opening))
        return self._opened

    def _look_for_results(self) -> list[str]:
        """The servers, and models whose servers are looked for, of those that the gateway was started with, without a first result yet.

        What is added or started anew later keeps nobody from the models that are served.
        """
        unconcluded = [*plan.unconcluded(self.config, self.known), *sorted(self.key_sets.awaited())]
        self._awaited.intersection_update(unconcluded)
        return [name for name in unconcluded if name in self._awaited]
