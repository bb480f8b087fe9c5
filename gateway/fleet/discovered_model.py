"""The models whose servers run already: the gateway only looks, and says how long it is worth waiting for one.

Times are in seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway import config as conf
from gateway.config import Config
from gateway.fleet import plan
from gateway.fleet.launched_model import FIRST_START
from upstream.balancing.server import Condition
from upstream.launcher.schedule import ModelPhase

_FIRST_PROBE = 3.0  # seconds after which a server that was found is known to be up or down


@dataclass(slots=True)
class Found:
    """One such model.

    ``comes``: they come and go, and its requests may wait for them; ``missing``: none of them is there, and some are to come.
    """

    servers: tuple[str, ...]
    phase: ModelPhase
    since: float
    comes: bool
    missing: bool = False

    @property
    def expected(self) -> float | None:
        """When one of them may be up; None: nobody knows of any."""
        if self.phase is ModelPhase.STARTING:
            return self.since + _FIRST_PROBE
        return self.since + FIRST_START if self.missing else None

    def see(self, conditions: Iterable[Condition], awaited: bool, now: float) -> None:
        """Take over what is known of its servers; ``awaited``: they are still looked for."""
        seen = {*conditions, *([Condition.LOADING] if awaited else [])}
        self.missing = self.comes and seen <= {Condition.OUT_OF_ROTATION}
        phase = ModelPhase.READY if Condition.UP in seen else ModelPhase.STARTING if Condition.LOADING in seen else ModelPhase.FAILED
        if phase is not self.phase:
            self.phase, self.since = phase, now


def found_servers(config: Config) -> Iterator[tuple[conf.Model, tuple[str, ...]]]:
    """The models whose servers run already, with the names of these."""
    servers: dict[str, list[str]] = {model.id: [] for model in config.models if model.launch is None}
    for place in plan.places(config):
        if place.model.id in servers:
            servers[place.model.id].append(place.name)
    return ((model, tuple(servers[model.id])) for model in config.models if model.id in servers)


def comes(model: conf.Model) -> bool:
    """Whether a model's requests wait for servers that are not there: who writes a queue for servers that come and go says so."""
    return model.discover is not None and model.queue is not None
