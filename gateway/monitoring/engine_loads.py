"""Sample the load of the servers whose models are routed by cost, and write it to the placement log.

The rules: a server is read once for each interval, and a server that does not respond in time is left out. Nothing is read for a model with
another policy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from gateway.admin.engine_metrics import Engine
from gateway.config import Config
from upstream.balancing.placement_log import Kind, PlacementLog, server_key
from upstream.vllm import metrics
from upstream.vllm.engine_counters import parse_load

INTERVAL = 1.0
"""Seconds between two samples."""
_READ_TIMEOUT = 2.0  # seconds: an older sample would say little
_READERS = 8  # servers that are read at the same time
_log = logging.getLogger("vllm_gateway.control")


class EngineLoads:
    """Samples all servers that are up. ``engines`` returns them by name, ``config`` the configuration in use."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]], config: Callable[[], Config], placements: PlacementLog) -> None:
        self._engines = engines
        self._config = config
        self._placements = placements
        self._readers = asyncio.Semaphore(_READERS)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            try:
                await asyncio.gather(*(self._sample(name, engine) for name, engine in self._sampled()))
            except Exception:  # noqa: BLE001  the outer edge: a bug with one sample must not end all others
                _log.exception("the servers' load could not be sampled")
            await asyncio.sleep(INTERVAL)

    def _sampled(self) -> Iterator[tuple[str, Engine]]:
        """Yield the servers of models that are routed by cost and have more than one server."""
        models = {model.id for model in self._config().models if model.balance == "cost"}
        engines = self._engines() if models else {}
        counts = Counter(engine.model for engine in engines.values())
        for name, engine in engines.items():
            if engine.model in models and counts[engine.model] > 1:
                yield name, engine

    async def _sample(self, name: str, engine: Engine) -> None:
        async with self._readers:
            now = time.monotonic_ns()
            text = await metrics.read_if_available(engine.target, _READ_TIMEOUT)
        found = None if text is None else parse_load(text)
        if found is not None:
            key = server_key(name)
            self._placements.write(Kind.LOAD, key, now, (found.running, found.waiting, round(1000 * found.kv_usage)))
            if found.cache_tokens:
                self._placements.write(Kind.CAPACITY, key, found.cache_tokens)
