"""Measure once a second: the tokens per second of each model, and the state of the gateway's dependencies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gateway.fleet.observed_servers import models_served
from gateway.monitoring.certificate import CertificateDates
from gateway.monitoring.discovery import Discovery
from gateway.monitoring.jwks_fetch import JwksFetcher
from gateway.monitoring.kv_events import KvEvents
from gateway.monitoring.server_observer import ServerObserver
from gateway.system import logs
from gateway.telemetry.dependencies import Dependencies, Observation
from gateway.telemetry.metrics import tokens_by_model
from gateway.telemetry.token_rates import TokenRates
from gateway.worker.supervisor import WorkerSupervisor

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog
    from gateway.ledger.writer import Ledger

_INTERVAL = 1.0  # seconds
_log = logging.getLogger("vllm_gateway.control")


class ObservedStore(Protocol):
    """The store of keys, as it is observed."""

    def dependency(self) -> Observation:
        """Return the state of its database."""


@dataclass(eq=False, slots=True)
class Monitor:
    """Measures token rates and observes dependencies."""

    _observer: ServerObserver
    _workers: WorkerSupervisor
    _discovery: Discovery
    _key_sets: JwksFetcher
    _kv_events: KvEvents
    _ledger: Ledger | None
    _audit: AuditLog | None = None
    _store: ObservedStore | None = None
    rates: TokenRates = field(default_factory=TokenRates)
    dependencies: Dependencies = field(default_factory=Dependencies)
    certificate: CertificateDates = field(default_factory=CertificateDates)
    _wrong_models: dict[str, str] = field(default_factory=dict)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self.rates.observe(time.monotonic(), tokens_by_model(self._workers.boards))
            self.observed_dependencies()
            self._report_wrong_models()
            logs.report_suppressed(time.monotonic())
            await asyncio.sleep(_INTERVAL)

    def _report_wrong_models(self) -> None:
        """Log each server that begins or ceases to serve another model than the one of the configuration."""
        found = {server.name: wrong for server, wrong in models_served(self._observer.config, self._observer.observe())}
        for name, wrong in found.items():
            if wrong != self._wrong_models.get(name, ""):
                _log.log(logging.WARNING if wrong else logging.INFO, "%s %s", name, wrong or "serves its model now")
        self._wrong_models |= found

    def observed_dependencies(self) -> Dependencies:
        """Observe the dependencies at this moment, and return them."""
        self.dependencies.observe(self._observations(), time.time())
        return self.dependencies

    def _observations(self) -> Iterator[Observation]:
        if (store := self._workers.store_status()) is not None:
            yield Observation("limits_store", error=store.error)
        if self._ledger is not None:
            yield from self._ledger.dependencies()
        if self._audit is not None:
            yield from self._audit.dependencies()
        if self._store is not None:
            yield self._store.dependency()
        yield from self._key_sets.dependencies()
        yield from self._discovery.dependencies(self._observer.config)
        yield from self._kv_events.dependencies()
        yield from self.certificate.dependencies(self._observer.config)
