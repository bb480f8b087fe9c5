"""Sample the token counters of the servers for the ledger, and count what the reconciliation finds.

The rules: a server is read once for each interval, and a server that does not respond is left out. A sample is quiet only if neither the
engine nor this gateway had a request of its model in flight, and none ended, while it was read. A server of two models is not sampled,
because its counters cannot be assigned to rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from gateway.admin.engine_metrics import Engine
from gateway.config import Config
from gateway.fleet.configured_servers import configured_servers
from gateway.ledger.engine_samples import EngineSample
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.schema import COUNTERS
from gateway.ledger.writer import Ledger
from gateway.system.tasks import wait_at_most
from gateway.telemetry.metrics import CounterSums
from gateway.telemetry.shared_counters import SharedCounters
from gateway.usage.queries import UsageQuery
from gateway.usage.reader import UsageReader
from gateway.usage.reconciliation import UNBILLED, unbilled
from upstream.vllm import metrics_request
from upstream.vllm.engine_counters import EngineCounters, parse_counters

_READ_TIMEOUT = 5.0  # seconds
_READERS = 8  # servers that are read at the same time
_DELIVERY = 5.0  # seconds after the end of a slot in which its last rows and samples reach the database
_COUNTED = {"requests_total": 0, "inflight_requests": 0, "mirrored_requests_total": 1, "mirrored_inflight_requests": 1}
_log = logging.getLogger("vllm_gateway.control")

Traffic = Mapping[str, tuple[float, float]]


@dataclass(eq=False)
class EngineSampler:
    """Samples all servers that are up. ``engines`` returns them by name, ``config`` the configuration in use."""

    _engines: Callable[[], Mapping[str, Engine]]
    _config: Callable[[], Config]
    _counters: Sequence[SharedCounters]
    _ledger: Ledger
    _reader: UsageReader
    _interval: float
    _readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_READERS))
    _began: float = field(default_factory=time.time)
    _started: dict[str, int] = field(default_factory=dict)
    _known_since: dict[str, float] = field(default_factory=dict)
    """The time from which the gateway could send requests to each server, or the start of a server that it launches."""
    _without_counters: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._sums = CounterSums(self._counters, _COUNTED)
        self._reconciled = self._slot(self._began)

    async def run(self) -> None:
        """Sample and reconcile until cancelled."""
        while True:
            try:
                await self.sample()
                await self._reconcile()
            except Exception:  # noqa: BLE001  the outer edge: a bug with one sample must not end all others
                _log.exception("the servers' token counters could not be sampled")
            await asyncio.sleep(self._interval)

    async def sample_last(self) -> None:
        """Sample for the last time, up to a timeout, so that the requests before the stop are confirmed."""
        await wait_at_most(_READ_TIMEOUT, self.sample())

    async def sample(self) -> None:
        """Read the counters of all servers once, and pass them to the ledger."""
        engines, before = self._engines(), self._traffic()
        shared = {address for address, count in Counter(engine.target.address for engine in engines.values()).items() if count > 1}
        self._note_added(engines)
        sampled = {name: engine for name, engine in engines.items() if engine.target.address not in shared}
        found = await asyncio.gather(*(self._read(engine) for engine in sampled.values()))
        after, now = self._traffic(), time.time()
        for (server, engine), counters in zip(sampled.items(), found, strict=True):
            for reason in UNBILLED:
                self._ledger.unbilled.setdefault((engine.model, reason), 0)
            if counters is not None:
                is_idle = before.get(engine.model) == after.get(engine.model) and not after.get(engine.model, (0.0, 0.0))[0]
                self._ledger.samples.add(self._samples(server, engine.model, counters, now, is_idle))

    def _note_added(self, engines: Mapping[str, Engine]) -> None:
        """Note servers that were added while they ran: the tokens that they had counted before belong to others."""
        launched = {server.name for server in configured_servers(self._config()) if server.external is None}
        is_first, now = not self._known_since, time.time()
        for name in engines.keys() - self._known_since.keys():
            self._known_since[name] = self._began if is_first or name in launched else now

    async def _read(self, engine: Engine) -> EngineCounters | None:
        async with self._readers:
            text = await metrics_request.read_if_available(engine.target, _READ_TIMEOUT)
        if text is None:
            return None
        counters = parse_counters(text)
        if counters is None and engine.target.name not in self._without_counters:
            self._without_counters.add(engine.target.name)
            _log.warning("%s has no token counters in its metrics, so `usage --reconcile` leaves it out", engine.target.name)
        return counters

    def _samples(self, server: str, model: str, counters: EngineCounters, now: float, is_idle: bool) -> Iterator[EngineSample]:
        """Yield the sample. If the engine started while this gateway knew it, yield a sample of its start first."""
        counts = {name: getattr(counters, name) for name in COUNTERS}
        sample = EngineSample(server, model, counters.started, now, is_idle and not counters.unfinished, **counts)
        if counters.started != self._started.get(server):
            started = counters.started / 1000
            yield sample.at_start(started) if started > self._known_since[server] else replace(sample, is_first=True)
        self._started[server] = counters.started
        yield sample

    def _traffic(self) -> Traffic:
        """Return the requests in flight and the finished requests of each model and its adapters, with the copies that they got."""
        return {
            model.id: (
                sum(self._sums.sum(family, name) for name in names for family in ("inflight_requests", "mirrored_inflight_requests")),
                sum(self._sums.sum(family, name) for name in names for family in ("requests_total", "mirrored_requests_total")),
            )
            for model in self._config().models
            for names in ((model.id, *(lora.id for lora in model.loras)),)
        }

    def _slot(self, time: float) -> float:
        length = self._ledger.samples.slot_length
        return time // length * length

    async def _reconcile(self) -> None:
        """Count the unbilled tokens of the slots that have ended since the last call."""
        until = self._slot(time.time() - _DELIVERY)
        if until <= self._reconciled:
            return
        query = UsageQuery((), datetime.fromtimestamp(self._reconciled, UTC), datetime.fromtimestamp(until, UTC))
        try:
            result = await self._reader.reconcile(query)
        except DatabaseUnavailableError:
            return  # the ledger reports it; the next time includes these slots
        self._reconciled = until
        for labels, tokens in unbilled(result.servers).items():
            self._ledger.unbilled[labels] = self._ledger.unbilled.get(labels, 0) + tokens
