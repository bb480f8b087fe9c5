"""Send snapshots with a growing version and health messages with a growing number to the workers.

The rule: workers get servers, models and keys only from here, so each worker serves from one consistent state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from gateway.config import Config
from gateway.fleet.configured_servers import configured_servers
from gateway.fleet.observed_servers import conditions, loaded_models, max_model_len, tasks, with_scale_out
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.monitoring.discovery import discovered_models
from gateway.monitoring.server_observer import ServerObserver
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Snapshot
from gateway.worker.supervisor import WorkerSupervisor
from upstream.balancing.server import Condition


class FirstResults:
    """Follow the parts of the initial configuration until each part has had a first result and the workers have applied it.

    Parts are the servers, the models with discovery, and the issuers with a JWKS URL. Servers that are added or restarted later never
    delay the gateway's readiness.
    """

    def __init__(self, config: Config) -> None:
        self._pending = {server.name for server in configured_servers(config)}
        self._pending |= {model.id for model, _ in discovered_models(config)}
        self._pending |= {issuer.issuer for issuer in config.jwt}
        self._number: int | None = None
        self._is_applied = False

    def pending(self, without_result: Sequence[str]) -> list[str]:
        """Return the parts in ``without_result`` that have never had a result."""
        self._pending.intersection_update(without_result)
        return [name for name in without_result if name in self._pending]

    def published(self, number: int) -> None:
        """Note that a message was sent. The first one after all results contains them."""
        if self._number is None and not self._pending:
            self._number = number

    def are_applied(self, is_applied: Callable[[int], bool]) -> bool:
        """Return whether every worker knows the first results. Once true it stays true: a replaced worker changes nothing."""
        self._is_applied = self._is_applied or (self._number is not None and is_applied(self._number))
        return self._is_applied


class Publisher:
    """Sends snapshots and health to the workers. ``version`` is the version of the last snapshot, 0 before the first.

    ``started`` is when the gateway was started, in seconds since the epoch.
    """

    def __init__(self, observer: ServerObserver, workers: WorkerSupervisor, first_results: FirstResults, started: float) -> None:
        self._observer = observer
        self._workers = workers
        self._first_results = first_results
        self._started = started
        self._is_scheduled = False
        self.version = 0
        self.published: Mapping[str, Condition] = {}
        """The condition of each server as it was last sent to the workers."""
        self.changed_at: Mapping[str, float] = {}
        """The time at which each server entered its condition, in seconds since the epoch."""
        self.expected: Callable[[], Mapping[str, float]] = dict
        """Returns when each model that is down may be up."""
        self.max_inflight: Callable[[], Mapping[str, int]] = dict
        """Returns the limit of each server for which it is ``auto``."""
        self.raised: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
        """Returns a snapshot with the raises of limits that are in force."""

    def publish_snapshot(self) -> int:
        """Send the workers a snapshot of the current servers. Returns the message's number for ``have_applied``."""
        self.version += 1
        snapshot = build_snapshot(self._observer.config, self._observer.observe(), self.version, int(self._started))
        return self._published(self._workers.apply_snapshot(self.raised(snapshot), self._health()))

    def publish_health(self) -> int:
        """Send the workers the current health of servers and models. Returns the message's number for ``have_applied``."""
        return self._published(self._workers.apply_health(self._health()))

    def schedule_health(self, then: Callable[[], None]) -> None:
        """Send the health in the next event-loop iteration, once for all changes of this iteration, and call ``then``."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._publish_scheduled, then)

    def _publish_scheduled(self, then: Callable[[], None]) -> None:
        self._is_scheduled = False
        self.publish_health()
        then()

    def conditions(self) -> Mapping[str, Condition]:
        """Return the condition of every server."""
        return self._observer.conditions()

    def _published(self, number: int) -> int:
        self._first_results.published(number)
        return number

    def _health(self) -> Health:
        self._first_results.pending(self._observer.without_first_result())
        config, observed = self._observer.config, self._observer.observe()
        present = conditions(config, observed)
        now, before, self.published = time.time(), self.published, present  # every change is published, so none is missed
        self.changed_at = {name: self.changed_at[name] if before.get(name) is condition else now for name, condition in present.items()}
        lengths, limits = max_model_len(config, observed), self.max_inflight()
        return Health(
            present,
            lengths,
            self.expected(),
            tasks=tasks(config, observed),
            max_inflight=limits,
            scale_out=with_scale_out(observed),
            loaded=loaded_models(config, observed),
        )
