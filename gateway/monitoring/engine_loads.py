"""Sample the load of servers whose models are routed by cost, for the placement log, or whose limits follow it.

The rules: a server is read once for each interval, and a server that does not respond in time is left out. Nothing is read for other
models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.admin.engine_metrics import Engine
from gateway.config import Config
from gateway.monitoring.auto_limits import AutoLimits
from upstream.balancing.placement_log import Kind, PlacementLog, server_key
from upstream.vllm import metrics_request
from upstream.vllm.engine_counters import EngineMetrics, parse_load

INTERVAL = 1.0
"""Seconds between two samples."""
_READ_TIMEOUT = 2.0  # seconds: an older sample would say little
_READERS = 8  # servers that are read at the same time
_log = logging.getLogger("vllm_gateway.control")


@dataclass(frozen=True, slots=True)
class _Sample:
    """The load of a server, with the time before it was read, in nanoseconds, and the time after it, in seconds."""

    began_ns: int
    ended: float
    load: EngineMetrics


class EngineLoads:
    """Samples all servers that are up. ``engines`` returns them by name, ``config`` the configuration in use."""

    def __init__(
        self, engines: Callable[[], Mapping[str, Engine]], config: Callable[[], Config], placements: PlacementLog, limits: AutoLimits
    ) -> None:
        self._engines = engines
        self._config = config
        self._placements = placements
        self._limits = limits
        self._readers = asyncio.Semaphore(_READERS)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            try:
                await self._sample_all()
            except Exception:  # noqa: BLE001  the outer edge: a bug with one sample must not end all others
                _log.exception("the servers' load could not be sampled")
            await asyncio.sleep(INTERVAL)

    async def _sample_all(self) -> None:
        models = self._config().models
        by_cost = {model.id for model in models if model.balance == "cost"}
        limited = {model.id for model in models if model.max_inflight_follows_load}
        if not by_cost and not limited:
            return
        engines = self._engines()
        counts = Counter(engine.model for engine in engines.values())
        placed = {model for model in by_cost if counts[model] > 1}  # a single server is not chosen, so its load does not matter
        sampled = {name: engine for name, engine in engines.items() if engine.model in placed | limited}
        samples = await asyncio.gather(*map(self._sample, sampled.values()))
        of_limits: dict[str, tuple[float, EngineMetrics] | None] = {}
        for (name, engine), sample in zip(sampled.items(), samples, strict=True):
            if sample is not None and engine.model in placed:
                self._write_placement(name, sample)
            if engine.model in limited:
                of_limits[name] = None if sample is None else (sample.ended, sample.load)
        if of_limits:
            self._limits.observe(of_limits)

    async def _sample(self, engine: Engine) -> _Sample | None:
        async with self._readers:
            began = time.monotonic_ns()
            text = await metrics_request.read_if_available(engine.target, _READ_TIMEOUT)
        load = None if text is None else parse_load(text)
        return None if load is None else _Sample(began, time.monotonic(), load)

    def _write_placement(self, name: str, sample: _Sample) -> None:
        key, load = server_key(name), sample.load
        self._placements.write(Kind.LOAD, key, sample.began_ns, (load.running, load.waiting, round(1000 * load.kv_usage)))
        if load.cache_tokens:
            self._placements.write(Kind.CAPACITY, key, load.cache_tokens)
