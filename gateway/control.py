"""The control process: reads the configuration, starts what is needed, watches it, and stops it in order.

It never touches a client's bytes. The rules: what was started is ended by the ``async with`` that started it, so
every way out leaves no process and no port; relays learn of servers from here alone; on the way down, clients
are served to their end before a server is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from gateway import __version__, admin_socket, logs, plan
from gateway import config as conf
from gateway.admin import application
from gateway.admin_guard import Guard
from gateway.admin_socket import OwnUsersProtocol, SocketTakenError
from gateway.announce import Announcer
from gateway.config import Config, load
from gateway.discovery import Change, Discovery, changes, discovered
from gateway.engines import Engine
from gateway.fleet import STOP_GRACE, Fleet
from gateway.key_list import LastUse, shown_keys
from gateway.key_sets import KeySets, key_sets
from gateway.link import Health
from gateway.metrics import Series, summed, tokens_by_model
from gateway.operations import RefusedOperation
from gateway.parting import let_nobody_in
from gateway.rates import Rates
from gateway.relays import LOOK, Relays, relays
from gateway.reload import History, Reading, Reloader
from gateway.service_manager import VARIABLES, ServiceManager
from gateway.signals import on_hangup, stop_signals
from upstream.discovery import Cluster, Sources, Standing
from upstream.health import Probe, Prober
from upstream.launcher import Launcher, Snapshot
from upstream.launcher import State as Stage
from upstream.launcher.schedule import Action
from upstream.server import Condition
from upstream.vllm import inherited

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger

_BACKLOG = 4096
_PROBE_DEADLINE = 10.0  # seconds for GET /health: a busy vLLM has been seen to take six
_LOOK_EVERY = 1.0  # seconds between two looks at the counts of tokens
_ACQUAINT = 0.3  # seconds in which a server that a new configuration brings may answer its first probe
_ENDING = 30.0  # seconds for what has no other bound of its own on the way down
_TAKEN = 5.0  # seconds in which every relay should have taken a generation
_log = logging.getLogger("vllm_gateway.control")


class StartError(Exception):
    """The gateway could not start; the text says why, in one line."""


def serve(path: Path, announcer: Announcer | None = None) -> int:
    """Run the gateway of this configuration until SIGTERM or SIGINT; returns the exit code.

    Raises gateway.config.ConfigurationError for a bad configuration and StartError when a port can't be had.
    """
    config = load(path)
    speak_by(config)
    return asyncio.run(run(config, path, announcer or Announcer()))


def speak_by(config: Config) -> None:
    """Have standard error written to as the configuration says."""
    logs.configure(plan.log_settings(config), "control")


async def run(config: Config, path: Path, announcer: Announcer) -> int:
    """Start everything, wait for the word to stop, stop everything. ``path``: where the configuration is from."""
    asked = stop_signals()
    asyncio.get_running_loop().set_exception_handler(logs.uncaught)
    async with AsyncExitStack() as stack:
        data = stack.enter_context(closing(listen(config.server.host, config.server.port)))
        admin = stack.enter_context(closing(listen(config.server.admin.host, config.server.admin.port)))
        commands = _admin_socket(path, stack)
        control = Control(config, announcer, ServiceManager.of(os.environ, os.getpid()))
        control.asked = asked
        environ = inherited(_without(os.environ, {*config.withheld, *VARIABLES}), Path(sys.executable).parent)
        launcher = Launcher(on_change=control.launched, log_folder=log_folder(), environ=environ)
        control.launcher = await stack.enter_async_context(launcher)
        prober = Prober(on_change=control.probed, on_lost=control.lost, deadline=_PROBE_DEADLINE)
        control.prober = await stack.enter_async_context(prober)
        sources = await stack.enter_async_context(Sources(control.found, Cluster.of(os.environ)))
        control.discovery = Discovery(sources)
        control.key_sets = await stack.enter_async_context(key_sets(control.fetched))
        control.ledger = _ledger(config, path, stack)
        control.relays = await stack.enter_async_context(
            relays(data, config.server.relays, control.nudged, control.key_sets.ask, control.ledger)
        )
        control.fleet = Fleet(config, control.launcher, control.relays, control)
        control.reloader = Reloader(path, config, control)
        on_hangup(asked, control.reloader.ask)
        await stack.enter_async_context(_background(control.manager.run(control)))
        shown = application(control, control)
        control.lasting.append(await stack.enter_async_context(_served(_guarded(shown, config.server.admin), admin)))
        if commands is not None:
            await stack.enter_async_context(_served(shown, commands, OwnUsersProtocol))
        control.lasting += [await stack.enter_async_context(_background(work)) for work in (control.watch_tokens(), control.watch_relays())]
        announcer.summary(config, data, admin)
        control.begin()
        fleet = await stack.enter_async_context(_background(control.fleet.run()))
        waiting = await stack.enter_async_context(_background(control.report_progress()))
        files = await stack.enter_async_context(_background(control.reloader.run()))
        control.lasting += [fleet, files]
        await asked.get()
        files.cancel()
        await _linger(control, asked)
        waiting.cancel()
        fleet.cancel()
        let_nobody_in(data)
        data.close()  # the relays close theirs: who comes then is refused, and does not wait in the kernel's queue
        await _stop(control, asked)
    return 0


async def _linger(control: Control, asked: asyncio.Queue[int]) -> None:
    """Serve on while those who send requests hear that no more should come; a second signal ends it."""
    control.leave()
    seconds = control.config.server.linger
    if seconds:
        control.announcer.lingering(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asked.get()


async def _stop(control: Control, asked: asyncio.Queue[int]) -> None:
    """Clients first, then servers; a second signal ends the patience."""
    control.announcer.stopping(control.config.server.drain)
    stopping = asyncio.create_task(control.end())
    impatient = asyncio.create_task(asked.get())
    await asyncio.wait((stopping, impatient), return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, impatient):
        task.cancel()
    await asyncio.gather(stopping, impatient, return_exceptions=True)


def _without(environ: Mapping[str, str], names: Set[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def state_folder() -> Path:
    """What is kept between runs: the user's state folder (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "vllm-gateway"


def log_folder() -> Path:
    """Where launched servers' logs go."""
    return state_folder() / "logs"


def _ledger(config: Config, path: Path, stack: AsyncExitStack) -> Ledger | None:
    """The ledger, if there is to be one, running until the stack ends. Raises StartError where its spool can't be had."""
    if config.ledger is None:
        return None
    from gateway.ledger.errors import SpoolTakenError  # SQLAlchemy and alembic are loaded by those who need them
    from gateway.ledger.writer import running, spool_folder

    folder = spool_folder(state_folder(), path)
    try:
        return stack.enter_context(running(config.ledger, Path(os.path.abspath(path)).parent, folder, config.server.relays))
    except (SpoolTakenError, OSError) as error:
        raise StartError(f"the ledger has no place for its spool: {error}") from error


def _admin_socket(path: Path, stack: AsyncExitStack) -> socket.socket | None:
    """The socket for commands; None where there can be none, which is no reason not to serve. Raises StartError."""
    try:
        return stack.enter_context(admin_socket.listening(admin_socket.socket_path(path, os.environ)))
    except SocketTakenError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        _log.warning("no admin socket, so commands will not reach this gateway: %s", error)
        return None


def _guarded(app: Starlette, section: conf.Admin) -> Guard:
    return Guard(app, None if section.token is None else section.token.get_secret_value(), section.host)


@asynccontextmanager
async def _served(
    app: ASGIApp, listener: socket.socket, http: type[asyncio.Protocol] | Literal["auto"] = "auto"
) -> AsyncIterator[asyncio.Task[None]]:
    config = uvicorn.Config(app, http=http, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
    server = uvicorn.Server(config)
    async with _background(server._serve([listener])) as task:
        yield task
        server.should_exit = True
        server.force_exit = True


@asynccontextmanager
async def _background(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A task that does not outlive the block."""
    task = asyncio.create_task(work, name=work.__qualname__)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Control:
    """What control knows, and whom it tells. The ``Overview`` and the ``Operations`` of the admin port and socket."""

    launcher: Launcher
    prober: Prober
    relays: Relays
    fleet: Fleet
    discovery: Discovery
    reloader: Reloader
    key_sets: KeySets
    asked: asyncio.Queue[int]
    """Whatever is put in asks for the end."""
    ledger: Ledger | None = None

    def __init__(self, config: Config, announcer: Announcer, manager: ServiceManager | None = None) -> None:
        self._read = config
        self.config = config  # as it was read, with the servers that were found
        self.announcer = announcer
        self.manager = manager or ServiceManager(None, None)
        self.lasting: list[asyncio.Task[None]] = []  # what works as long as the gateway serves
        self.history = History()
        self._started = time.time()
        self._awaited = {place.name for place in plan.places(config)} | {model.id for model, _ in discovered(config)}
        self._awaited |= {issuer.issuer for issuer in config.jwt}
        self._leaving = False  # no more requests should come
        self._draining = False  # and no more are served
        self._generation = 0
        self._news = False  # the relays are about to be told of probes
        self._launches: dict[tuple[str, str], int] = {}
        self._expect_launches()
        self._stages: dict[str, Stage] = {}
        self._changed: dict[str, float] = {}
        self._rates = Rates()

    # Starting and stopping

    def begin(self) -> None:
        """Look for servers, launch, probe, and have the relays serve."""
        self.discovery.look_for(self.config)
        self.key_sets.want(self.config)
        self.fleet.look()
        self.configure()
        self._watch_servers()

    def leave(self) -> None:
        """Say that no more requests should come."""
        self._leaving = True
        self.relays.leave()
        self.manager.stopping(self.config.server.linger + self.config.server.drain + STOP_GRACE + _ENDING)

    async def end(self) -> None:
        """Let clients finish, then end the servers."""
        self._leaving = self._draining = True
        await self.relays.drain(self.config.server.drain)
        names = [snapshot.name for snapshot in self.launcher.snapshots()]
        await asyncio.gather(*(self.launcher.stop(name, STOP_GRACE) for name in names))

    async def report_progress(self) -> None:
        """Tell the operator how the servers come up, until all have."""
        while waiting := self._look_for_results():
            self.announcer.waiting(waiting, time.time() - self._started, self._last_line)
            await asyncio.sleep(self.announcer.interval)
        self.announcer.serving(self._up(), self._expected_up())

    def _last_line(self, name: str) -> str:
        snapshot = self.known.snapshots.get(name)
        return snapshot.progress if snapshot else ""

    def _up(self) -> int:
        return sum(condition is Condition.UP for condition in plan.conditions(self.config, self.known).values())

    def _expected_up(self) -> int:
        away = self.fleet.away()
        return sum(place.name not in away for place in plan.places(self.config))

    async def watch_tokens(self) -> None:
        """Look at the counts of tokens, again and again."""
        while True:
            self._rates.look(time.monotonic(), tokens_by_model(self.relays.boards))
            logs.tell(time.monotonic())
            await asyncio.sleep(_LOOK_EVERY)

    async def watch_relays(self) -> None:
        """See whether the relays answer, again and again."""
        while True:
            self.relays.look(time.monotonic())
            await asyncio.sleep(LOOK)

    # What the service manager is told

    def broken(self) -> str | None:
        """What has stopped working and will not work again by itself; None while all is well."""
        ended = next((task for task in self.lasting if task.done()), None)
        return self.relays.broken(time.monotonic()) if ended is None else f"{ended.get_name()} has ended"

    def headline(self) -> str:
        """How the gateway is, in a line."""
        well = f"{self._up()} of {self._expected_up()} servers up"
        wrong = "" if self.history.last.successful else "; the configuration that was read last cannot be used"
        return f"{self.broken() or self.not_ready() or well}{wrong}"

    # Another configuration

    def reading(self) -> AbstractContextManager[None]:
        """Have the service manager know of a reading."""
        return self.manager.reloading()

    async def acquaint(self, config: Config) -> None:
        """Find and probe the servers that a configuration brings, so that a model that moves to others is up there when it does."""
        self.discovery.look_for(self._read, config)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ACQUAINT):
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
        """Serve by another configuration; what it does not change is not touched. Returns the number of the word to the relays."""
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
        if self._draining or not self._generation:
            return
        filled = self.discovery.fill(self._read)
        self.discovery.serve(filled)
        if changed := tuple(changes(self.config, filled)):
            self._take_servers(filled, changed)
        self._watch_servers()
        self.fleet.nudge()

    def fetched(self) -> None:
        """An issuer's keys are others, or the first look at them is over."""
        if self._generation and not self._draining:
            self.configure()

    def _take_servers(self, filled: Config, changed: Iterable[Change]) -> None:
        """Serve by a configuration that differs in nothing but the servers that were found."""
        self.config = filled
        for change in changed:
            self.announcer.found(change)
        self.fleet.find(filled)
        self.configure()
        self._forget_gone_ones()

    def _forget_gone_ones(self) -> None:
        there = {place.name for place in plan.places(self.config)}
        self._changed = {name: when for name, when in self._changed.items() if name in there}

    async def taken(self, number: int) -> None:
        """Wait until every relay serves by what it was told under this number, within reason."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_TAKEN):
                while not self.relays.hold(number):  # noqa: ASYNC110  # what is waited for is in other processes
                    await asyncio.sleep(0.005)

    def read(self, reading: Reading) -> None:
        """Tell the operator of a reading of the files."""
        self.announcer.reloaded(reading)

    def _expect_launches(self) -> None:
        for model in self.config.models:
            if model.launch is not None:
                for outcome in ("ready", "failed"):
                    self._launches.setdefault((model.id, outcome), 0)

    # What is known

    @property
    def known(self) -> plan.Knowledge:
        snapshots = plan.by_name(self.launcher.snapshots())
        probes = {probe.name: probe for probe in self.prober.probes()}
        return plan.Knowledge(
            snapshots,
            probes,
            {name: self.launcher.api_key(name) for name in snapshots},
            self.fleet.away() | self.discovery.named(Standing.LEAVING),
            self.discovery.named(Standing.UNREADY),
            self.discovery.awaited(self.config, probes),
            self.key_sets.known(),
        )

    def launched(self, snapshot: Snapshot) -> None:
        """The launcher tells of a change."""
        before = self._stages.get(snapshot.name)
        self._stages[snapshot.name] = snapshot.state
        if before is snapshot.state:
            return
        if before is Stage.STARTING:
            self._count_launch(snapshot)
        self.announcer.launched(snapshot)
        if self._generation and not self._draining:
            self.configure()
            self._watch_servers()
            self.fleet.changed(snapshot)

    def _count_launch(self, snapshot: Snapshot) -> None:
        outcome = {Stage.READY: "ready", Stage.FAILED: "failed"}.get(snapshot.state)
        if outcome is not None:
            self._launches[snapshot.name.rpartition("#")[0], outcome] += 1

    def probed(self, probe: Probe) -> None:
        """The prober tells of a change."""
        if not (probe.up and probe.name in self._stages):  # of a launched one the launcher has told
            self.announcer.probed(probe)
        self._changed[probe.name] = time.time()
        if not self._news:  # one look may tell of a thousand models
            self._news = True
            asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._news = False
        self.tell_health()
        self.fleet.nudge()

    def lost(self, probe: Probe) -> None:
        """The prober tells of a server that will not come back by itself; one that was launched here is started anew."""
        if probe.name in self.known.snapshots:
            self.launcher.renew(probe.name, probe.reason, STOP_GRACE)

    def nudged(self) -> None:
        """A relay has said something."""
        if not self._draining:
            self.fleet.nudge()

    def configure(self) -> int:
        """Have the relays serve by the servers that there are now; returns the number of that word."""
        self._generation += 1
        return self.relays.configure(plan.state(self.config, self.known, self._generation, int(self._started)), self._health())

    def _watch_servers(self) -> None:
        self.prober.set_targets(plan.targets(self.config, self.known))
        self.tell_health()

    def tell_health(self) -> int:
        """Tell the relays what is known of servers and models; returns the number of that word."""
        return self.relays.tell(self._health())

    def _health(self) -> Health:
        self._look_for_results()
        known = self.known
        return Health(plan.conditions(self.config, known), plan.max_model_len(self.config, known), self.fleet.telling())

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
        await self.fleet.start(model)

    async def stop(self, model: str) -> None:
        """Let a model's requests finish, end its servers, and hold it down."""
        await self.fleet.stop(model)

    async def restart(self, model: str) -> None:
        """Replace a model's servers, one after the other."""
        await self.fleet.restart(model)

    async def wake(self, model: str) -> None:
        """Wake a model as a request would."""
        await self.fleet.wake(model)

    async def reload(self) -> Reading:
        """Read the configuration again, and serve by it if it is good."""
        if self._leaving:
            raise RefusedOperation("the gateway is stopping")
        return await self.reloader.reload()

    async def drain(self) -> None:
        """Begin to stop."""
        if self._leaving:
            raise RefusedOperation("the gateway is stopping")
        self.leave()
        self.asked.put_nowait(signal.SIGTERM)

    # What the admin port shows

    def not_ready(self) -> str | None:
        if self._leaving:
            return "draining"
        if not any(status.up for status in self.relays.statuses):
            return "no relay is up"
        waiting = self._look_for_results()
        return f"waiting for {', '.join(waiting)}" if waiting else None

    def _look_for_results(self) -> list[str]:
        """The servers, and models whose servers are looked for, of those that the gateway was started with, without a first result yet.

        What is added or started anew later keeps nobody from the models that are served.
        """
        unconcluded = [*plan.unconcluded(self.config, self.known), *sorted(self.key_sets.awaited())]
        self._awaited.intersection_update(unconcluded)
        return [name for name in unconcluded if name in self._awaited]

    def series(self) -> Mapping[Series, Sequence[float]]:
        series: dict[Series, Sequence[float]] = self._without_gone_ones(summed(self.relays.boards))
        known = self.known
        for place in plan.places(self.config):
            condition, labels = plan.condition(place.name, known), (place.model.id, place.name)
            series[Series("server_up", labels)] = (float(condition is Condition.UP),)
            series[Series("server_resting", labels)] = (float(condition is Condition.AWAY),)
            if place.server is None:
                snapshot = known.snapshots.get(place.name)
                series[Series("server_restarts_total", labels)] = (snapshot.restarts if snapshot else 0,)
            series.setdefault(Series("server_inflight", labels), (0,))
            series.setdefault(Series("server_ejected", labels), (0,))
        for model, well in self.discovery.well(self.config):
            series[Series("discovery_up", (model,))] = (float(well),)
        for issuer, well in self.key_sets.well():
            series[Series("key_set_up", (issuer,))] = (float(well),)
        for outcome, count in self._launches.items():
            series[Series("launches_total", outcome)] = (count,)
        for result, count in self.history.counts.items():
            series[Series("config_reloads_total", (result,))] = (count,)
        series[Series("config_last_reload_successful", ())] = (float(self.history.last.successful),)
        for key in self.config.keys:
            if key.expires is not None:
                series[Series("key_expires_timestamp_seconds", (key.id,))] = (key.expires.timestamp(),)
        series[Series("relay_restarts_total", ())] = (sum(relay.restarts for relay in self.relays.statuses),)
        series[Series("build_info", (__version__,))] = (1,)
        if self.ledger is not None:
            series |= self.ledger.series()
        return series

    def _without_gone_ones(self, series: Mapping[Series, list[float]]) -> dict[Series, Sequence[float]]:
        """Where servers come and go, those that are gone and have nothing in flight are shown no more; their counts stay for one that
        comes under the same name."""
        found = {model.id for model, _ in discovered(self.config)}
        there = {(place.model.id, place.name) for place in plan.places(self.config)}
        busy = {one.labels for one, values in series.items() if one.family == "server_inflight" and values[0]}
        return {
            one: values
            for one, values in series.items()
            if not (one.family.startswith("server_") and one.labels[0] in found) or one.labels[:2] in there or one.labels[:2] in busy
        }

    async def usage(self, words: Mapping[str, str]) -> dict[str, Any] | None:
        return None if self.ledger is None else await self.ledger.usage(words)

    async def keys(self) -> dict[str, Any]:
        use = LastUse({}, "no ledger is configured") if self.ledger is None else await self.ledger.last_use(self.config)
        return shown_keys(self.config, use, datetime.now(UTC))

    def engines(self) -> dict[str, Engine]:
        models = {place.name: place.model.id for place in plan.places(self.config)}
        return {target.name: Engine(models[target.name], target) for target in plan.targets(self.config, self.known)}

    def status(self) -> dict[str, Any]:
        known, series = self.known, summed(self.relays.boards)
        return {
            "version": __version__,
            "time": time.time(),
            "started": self._started,
            "ready": self.not_ready() is None,
            "reason": self.not_ready(),
            "generation": self._generation,
            "configuration": self.history.last.shown(),
            "ledger": None if self.ledger is None else self.ledger.status(),
            "issuers": self.key_sets.shown(self.config),
            "relays": [
                {"number": relay.number, "pid": relay.pid, "up": relay.up, "generation": relay.generation, "restarts": relay.restarts}
                for relay in self.relays.statuses
            ],
            "models": [self._model_status(model, known, series) for model in self.config.models],
        }

    def _model_status(self, model: conf.Model, known: plan.Knowledge, series: Mapping[Series, Sequence[float]]) -> dict[str, Any]:
        standing = self.fleet.standing(model.id)
        return {
            **self._traffic(model.id, series),
            "max_inflight": model.max_inflight,
            "aliases": list(model.aliases),
            "state": standing.state.value,
            "since": standing.since,
            "queued": standing.queued,
            "waiting_s": standing.waiting,
            "discovery": self.discovery.shown(model),
            "loras": [self._traffic(lora.id, series) | {"aliases": list(lora.aliases)} for lora in model.loras],
            "servers": [self._server_status(place, known, series) for place in plan.places(self.config) if place.model is model],
        }

    def _traffic(self, model: str, series: Mapping[Series, Sequence[float]]) -> dict[str, Any]:
        in_flight = int(series.get(Series("inflight_requests", (model,)), (0,))[0])
        return {"id": model, "in_flight": in_flight, "tokens_per_second": asdict(self._rates.of(model))}

    def _server_status(self, place: plan.Place, known: plan.Knowledge, series: Mapping[Series, Sequence[float]]) -> dict[str, Any]:
        snapshot, probe = known.snapshots.get(place.name), known.probes.get(place.name)
        shown: dict[str, Any] = {
            "name": place.name,
            "condition": plan.condition(place.name, known).value,
            "in_flight": int(series.get(Series("server_inflight", (place.model.id, place.name)), (0,))[0]),
            "ejected_by": int(series.get(Series("server_ejected", (place.model.id, place.name)), (0,))[0]),
            "since": self._changed.get(place.name),
            "reason": (snapshot.reason if snapshot else "") or (probe.reason if probe else ""),
        }
        standing = self.discovery.standing(place.name)
        if standing is not None:
            shown |= {"endpoint": standing.value}
        if snapshot is not None:
            shown |= {
                "state": snapshot.state.value,
                "since": snapshot.since,
                "pid": snapshot.pid,
                "restarts": snapshot.restarts,
                "given_up": snapshot.given_up,
                "progress": snapshot.progress,
                "log": str(snapshot.log),
                "last_log_lines": self.launcher.log_tail(place.name).splitlines()[-20:],
            }
        return shown
