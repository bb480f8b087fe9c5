"""The control process: it reacts to events of the launcher, prober, discovery and workers, and applies configurations.

It never touches a client's bytes. The rule: an event updates the fleet, the health-check targets and the workers together, so that all
of them follow the same observation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.config import Config
from gateway.control.budgets import BudgetRestorer
from gateway.control.publisher import Publisher
from gateway.control.raises import Raises
from gateway.control.readiness import Readiness
from gateway.control.reload import ReloadHistory
from gateway.control.startup_messages import Announcer
from gateway.control.store_counts import StoreCounts
from gateway.fleet.fleet import Fleet
from gateway.fleet.launch_counts import LaunchCounts
from gateway.fleet.operations import ReloadResult
from gateway.fleet.snapshot_builder import log_settings
from gateway.fleet.transitions import STOP_GRACE
from gateway.monitoring.auto_limits import AutoLimits
from gateway.monitoring.discovery import Discovery, server_changes
from gateway.monitoring.jwks_fetch import JwksFetcher
from gateway.monitoring.kv_events import KvEvents
from gateway.monitoring.monitor import Monitor
from gateway.monitoring.server_observer import ServerObserver
from gateway.system import logs
from gateway.system.service_manager import ServiceManager
from gateway.worker.supervisor import WorkerSupervisor
from upstream.balancing.server import Condition
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.vllm.health import ServerHealth

if TYPE_CHECKING:
    from gateway.control.key_store import KeyStore
    from gateway.notices.service import Notices
    from gateway.sign_in.service import SignIn

_STOP_MARGIN = 30.0  # seconds for the parts of a stop that have no separate timeout


def configure_logging(config: Config) -> None:
    """Write the log as the configuration says."""
    logs.configure(log_settings(config), "control")


@dataclass(kw_only=True, eq=False)
class Control:
    """The running gateway without its ports: its parts and their connections."""

    started: float
    announcer: Announcer
    manager: ServiceManager
    launcher: Launcher
    discovery: Discovery
    key_sets: JwksFetcher
    observer: ServerObserver
    workers: WorkerSupervisor
    publisher: Publisher
    fleet: Fleet
    monitor: Monitor
    kv_events: KvEvents
    auto_limits: AutoLimits
    budgets: BudgetRestorer
    store_counts: StoreCounts
    readiness: Readiness
    history: ReloadHistory
    raises: Raises
    key_store: KeyStore | None = None
    launch_counts: LaunchCounts = field(default_factory=LaunchCounts)
    sign_in: SignIn | None = None
    """The sign-in of people, if it is configured."""
    notices: Notices | None = None
    """The notices, if any are configured."""
    after_drain: Callable[[], Awaitable[None]] | None = None
    """Runs when all requests have finished, before the launched servers are stopped."""
    _is_draining: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.launch_counts.expect(self.config)

    @property
    def config(self) -> Config:
        """The configuration in use, with the discovered servers."""
        return self.observer.config

    @property
    def _is_serving(self) -> bool:
        return self.publisher.version > 0 and not self._is_draining

    # Start and stop

    def start(self) -> None:
        """Start discovery, launches, health checks and workers."""
        self.discovery.set_sources(self.config)
        self.key_sets.follow(self.config)
        self.fleet.run_pass()
        self.publisher.publish_snapshot()
        self._update_health()

    async def report_progress(self) -> None:
        """Report the awaited servers to the operator until each has had a first result."""
        while pending := self.readiness.pending():
            self.announcer.waiting(pending, time.time() - self.started, self.observer.progress)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.announcer.interval):
                    while self.readiness.pending():
                        self._changed.clear()
                        await self._changed.wait()
        await self.workers.wait_applied(self.publisher.publish_health())
        self.announcer.serving(self.observer.up(), self.observer.in_rotation())

    def announce_stop(self) -> None:
        """Report to clients, load balancers and the service manager that the gateway accepts no more requests."""
        self.readiness.is_stopping = True
        self.workers.stop_keep_alive()
        server = self.config.server
        self.manager.stopping(server.linger + server.drain + STOP_GRACE + _STOP_MARGIN)

    async def stop(self) -> None:
        """Let open requests finish, then stop the launched servers."""
        self.readiness.is_stopping = self._is_draining = True
        await self.workers.drain(self.config.server.drain)
        if self.after_drain is not None:
            await self.after_drain()
        await asyncio.gather(*(self.launcher.stop(name, STOP_GRACE) for name in self.launcher.servers))

    # Another configuration: what the reloader needs

    def reading(self) -> AbstractContextManager[None]:
        """Report to the service manager that the configuration is being read."""
        return self.manager.reloading()

    async def check_added(self, config: Config) -> None:
        """Discover and check the servers that a configuration adds, before it is applied."""
        await self.observer.check_added(config)

    def apply_config(self, config: Config) -> int:
        """Apply another configuration. Parts without a change keep running.

        Returns the number of the change for ``wait_applied``.
        """
        observer = self.observer
        observer.config_as_read = config
        self.discovery.set_sources(config)
        self.key_sets.follow(config)
        observer.config = config = self.discovery.fill(config)
        self.discovery.use(config)
        configure_logging(config)
        self.launch_counts.expect(config)
        self.fleet.apply_config(config)
        if self.key_store is not None:
            self.key_store.use_config(config)
        number = self.publisher.publish_snapshot()
        self._update_health()
        self.fleet.request_pass()
        return number

    async def wait_applied(self, number: int) -> None:
        """Wait until every worker has applied a configuration, up to a timeout."""
        await self.workers.wait_applied(number)

    def reloaded(self, result: ReloadResult) -> None:
        """Report to the operator that the configuration was read again."""
        self.history.add(result)
        self.announcer.reloaded(result)

    async def set_cordoned(self, server: str, *, cordoned: bool) -> None:
        """Take a server out of rotation or return it. Returns when the workers have applied it."""
        (self.observer.cordoned.add if cordoned else self.observer.cordoned.discard)(server)
        self.observer.update_targets()
        self.fleet.request_pass()
        await self.wait_applied(self.publisher.publish_health())

    # Events

    def launch_status_changed(self, status: LaunchStatus) -> None:
        """Handle a change of a launched server."""
        if not self.launch_counts.record(status):
            return
        self._changed.set()
        self.announcer.launched(status)
        if self._is_serving:
            self.publisher.publish_snapshot()
            self._update_health()
            self.fleet.server_changed(status)

    def health_changed(self, probe: ServerHealth) -> None:
        """Handle a change of a server's health."""
        self._changed.set()
        state = self.launch_counts.state(probe.name)
        if state not in (None, LaunchState.READY):
            return  # it has ended or is being stopped, which the launcher reports
        is_known = state is LaunchState.READY or self.publisher.published.get(probe.name) is Condition.UP
        if not (probe.up and is_known):  # the launcher has reported that it is up, or only the server's task has changed
            self.announcer.probed(probe)
        self.publisher.schedule_health(self.fleet.request_pass)  # one iteration may bring the changes of a thousand models

    def server_lost(self, probe: ServerHealth) -> None:
        """Handle a server that will not recover. A launched server is restarted."""
        if probe.name in self.launcher.servers:
            self.launcher.servers[probe.name].restart(probe.reason, STOP_GRACE)

    def engine_hung(self, server: str, reason: str) -> None:
        """Handle a server whose engine hangs. A launched server is replaced, any other one is out of rotation until it recovers."""
        if server in self.launcher.servers:
            self.launcher.servers[server].restart(reason, STOP_GRACE)
            return
        self.observer.hung[server] = reason
        self.announcer.probed(ServerHealth(server, False, reason))
        self.publisher.schedule_health(self.fleet.request_pass)

    def engine_recovered(self, server: str) -> None:
        """Handle a server whose engine works again."""
        if self.observer.hung.pop(server, None) is not None:
            self.announcer.probed(ServerHealth(server, True))
            self.publisher.schedule_health(self.fleet.request_pass)

    def worker_changed(self) -> None:
        """Handle a message or the exit of a worker."""
        if not self._is_draining:
            self.fleet.request_pass()

    def servers_discovered(self) -> None:
        """Handle changes of discovered servers: added, about to be removed, or removed."""
        self._changed.set()
        if not self._is_serving:
            return
        filled = self.discovery.fill(self.observer.config_as_read)
        self.discovery.use(filled)
        if changes := tuple(server_changes(self.config, filled)):
            self.observer.config = filled
            for change in changes:
                self.announcer.found(change)
            self.fleet.apply_discovered(filled)
            self.publisher.publish_snapshot()
        self._update_health()
        self.fleet.request_pass()

    def key_set_changed(self) -> None:
        """Handle an issuer whose JWKS changed, or whose first fetch finished."""
        self._changed.set()
        if self._is_serving:
            self.publisher.publish_snapshot()

    def raises_changed(self) -> None:
        """Handle raises of limits that were made or have ended."""
        if self._is_serving:
            self.publisher.publish_snapshot()

    def _update_health(self) -> None:
        self.observer.update_targets()
        self.publisher.publish_health()
        self.kv_events.follow(self.config, self.observer.observe())
