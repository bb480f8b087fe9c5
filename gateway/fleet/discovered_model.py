"""The models whose servers the gateway does not launch: it observes the servers and estimates when a model may be up.

Times are in seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.configured_servers import configured_servers
from gateway.fleet.launched_model import FIRST_START
from upstream.balancing.server import Condition
from upstream.launcher.schedule import ModelPhase

_FIRST_HEALTH_CHECK = 3.0  # seconds after which a new server is known to be up or down


@dataclass(slots=True)
class ExternalModel:
    """A model with external or discovered servers.

    ``may_wait``: requests may wait for servers that discovery has not found yet. ``missing``: there is no server yet, but discovery may
    find servers later.
    """

    servers: tuple[str, ...]
    phase: ModelPhase
    since: float
    may_wait: bool
    missing: bool = False

    @property
    def expected(self) -> float | None:
        """When a server may be up. None: unknown."""
        if self.phase is ModelPhase.STARTING:
            return self.since + _FIRST_HEALTH_CHECK
        return self.since + FIRST_START if self.missing else None

    def observe(self, conditions: Iterable[Condition], undiscovered: bool, now: float) -> None:
        """Update the phase from the servers' conditions. ``undiscovered``: discovery has had no result yet."""
        observed = {*conditions, *([Condition.LOADING] if undiscovered else [])}
        self.missing = self.may_wait and observed <= {Condition.OUT_OF_ROTATION}
        phase = (
            ModelPhase.READY if Condition.UP in observed else ModelPhase.STARTING if Condition.LOADING in observed else ModelPhase.FAILED
        )
        if phase is not self.phase:
            self.phase, self.since = phase, now


def external_servers(config: Config) -> Iterator[tuple[conf.Model, tuple[str, ...]]]:
    """Yield the models that are not launched here, with the names of their servers."""
    servers: dict[str, list[str]] = {model.id: [] for model in config.served_models if model.launch is None}
    for server in configured_servers(config):
        if server.model.id in servers:
            servers[server.model.id].append(server.name)
    return ((model, tuple(servers[model.id])) for model in config.models if model.id in servers)


def may_wait(model: conf.Model) -> bool:
    """Return whether a model's requests wait for servers that do not exist yet: it uses discovery, and its ``queue`` is configured."""
    return model.discover is not None and model.queue is not None
