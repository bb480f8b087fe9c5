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
        found = await asyncio.gather(*(self._sample(name, engine, is_placed=engine.model in placed) for name, engine in sampled.items()))
        samples = {name: sample for name, sample in zip(sampled, found, strict=True) if engines[name].model in limited}
        if samples:
            self._limits.observe(samples)

    async def _sample(self, name: str, engine: Engine, *, is_placed: bool) -> tuple[float, EngineMetrics] | None:
        """Return the time after the sample, and the sample, if the server reports one. It is written for the policy ``cost``."""
        async with self._readers:
            began = time.monotonic_ns()
            text = await metrics_request.read_if_available(engine.target, _READ_TIMEOUT)
        ended, load = time.monotonic(), None if text is None else parse_load(text)
        if load is None:
            return None
        if is_placed:
            self._write_placement(name, began, load)
        return ended, load

    def _write_placement(self, name: str, time_ns: int, load: EngineMetrics) -> None:
        key = server_key(name)
        self._placements.write(Kind.LOAD, key, time_ns, (load.running, load.waiting, round(1000 * load.kv_usage)))
        if load.cache_tokens:
            self._placements.write(Kind.CAPACITY, key, load.cache_tokens)
