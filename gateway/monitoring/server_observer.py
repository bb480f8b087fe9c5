"""Observe the servers of the configuration in use, through the launcher, the prober and discovery.

The rule: every query makes a new observation, so one result never mixes the states of different times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from gateway.config import Config
from gateway.fleet.configured_servers import configured_servers
from gateway.fleet.observed_servers import ObservedServers, conditions, health_check_targets, ready_servers, without_first_result
from gateway.monitoring.discovery import Discovery
from gateway.monitoring.jwks_fetch import JwksFetcher
from gateway.system.tasks import wait_at_most, wait_until
from upstream.balancing.server import Condition
from upstream.discovery.endpoints import EndpointState
from upstream.launcher.launcher import Launcher
from upstream.vllm.health import Prober

_PAUSE = 0.01  # seconds between two checks of what the network reports


class ServerObserver:
    """Observes the servers. ``config`` is the configuration in use, with the discovered servers; ``config_as_read`` is without them."""

    def __init__(self, config: Config, launcher: Launcher, prober: Prober, discovery: Discovery, key_sets: JwksFetcher) -> None:
        self.config_as_read = self.config = config
        self._launcher = launcher
        self._prober = prober
        self._discovery = discovery
        self._key_sets = key_sets
        self.launched_out_of_rotation: Callable[[], frozenset[str]] = frozenset
        """Returns the launched servers that the fleet has taken out of rotation."""
        self.hung: dict[str, str] = {}
        """The servers that run elsewhere and whose engine hangs, with the reason."""
        self.cordoned: set[str] = set()
        """The servers that an operator has taken out of rotation."""
        self.added_timeout = 0.3
        """Seconds in which a server that a new configuration adds may respond to its first health check."""

    def observe(self) -> ObservedServers:
        """Observe all servers at this moment."""
        launched = {status.name: status for status in self._launcher.statuses()}
        probes = {probe.name: probe for probe in self._prober.servers()}
        return ObservedServers(
            launched,
            probes,
            api_keys={name: self._launcher.servers[name].api_key for name in launched},
            out_of_rotation=self.launched_out_of_rotation() | self.cordoned | self._discovery.named(EndpointState.TERMINATING),
            hung=frozenset(self.hung),
            unready=self._discovery.named(EndpointState.UNREADY),
            undiscovered=self._discovery.undiscovered(self.config, probes),
            key_sets=self._key_sets.known(),
        )

    def conditions(self) -> Mapping[str, Condition]:
        """Return the condition of every server."""
        return conditions(self.config, self.observe())

    def ready_servers(self) -> Mapping[str, int]:
        """Return the number of servers of each model that accept requests."""
        return ready_servers(self.config, self.observe())

    def undiscovered(self) -> Set[str]:
        """Return the models whose discovery has had no result yet."""
        return self.observe().undiscovered if self._discovery.may_be_undiscovered(self.config) else frozenset()

    def without_first_result(self) -> list[str]:
        """Return the servers, models and issuers without a first result."""
        return [*without_first_result(self.config, self.observe()), *sorted(self._key_sets.unfetched())]

    def served(self, server: str) -> tuple[str, str | None]:
        """Return the name under which a server knows its model, and the server's task, if it is known. Raises KeyError."""
        names = {each.name: each.served_model for each in configured_servers(self.config)}
        probe = self.observe().probes.get(server)
        return names[server], probe.task if probe else None

    def up(self) -> int:
        """Return the number of servers that are up."""
        return sum(condition is Condition.UP for condition in self.conditions().values())

    def in_rotation(self) -> int:
        """Return the number of servers that should be up: all servers except launched servers that are out of rotation."""
        out = self.launched_out_of_rotation() | self.cordoned
        return sum(server.name not in out for server in configured_servers(self.config))

    def progress(self, server: str) -> str:
        """Return the last line about the start of a launched server, or an empty text."""
        status = self.observe().launched.get(server)
        return status.progress if status else ""

    def update_targets(self) -> None:
        """Let the prober check the servers of the configuration in use."""
        self._prober.set_targets(health_check_targets(self.config, self.observe()))

    async def check_added(self, config: Config) -> None:
        """Discover and check the servers that a configuration adds, up to a timeout.

        So a model that moves to new servers is already up on them when the configuration is applied.
        """
        self._discovery.set_sources(self.config_as_read, config)
        await wait_at_most(self.added_timeout, self._check_new_targets(config))

    async def _check_new_targets(self, config: Config) -> None:
        await wait_until(lambda: self._discovery.has_results(config), _PAUSE)
        observed = self.observe()
        targets = health_check_targets(self._discovery.fill(config), observed)
        new = {target.name for target in targets} - {server.name for server in configured_servers(self.config)}
        if new:
            self._prober.set_targets((*health_check_targets(self.config, observed), *targets))
            await wait_until(lambda: new <= self.observe().probes.keys(), _PAUSE)
