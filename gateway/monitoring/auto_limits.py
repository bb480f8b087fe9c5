"""The limits of servers that follow the servers' load, with their reasons: ``max_inflight: auto``, or a number that gateways share.

The rule: a limit changes only by a sample of its server. A server that cannot be sampled keeps its limit, also while it is down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.configured_servers import ConfiguredServer, configured_servers, limit_bounds
from gateway.telemetry.metrics import Series, sum_series
from gateway.telemetry.shared_counters import SharedCounters
from upstream.vllm.auto_max_inflight import AutoLimit, LoadSample, Objectives, next_limit, unreachable
from upstream.vllm.engine_counters import EngineMetrics
from upstream.vllm.server_share import next_part

_COUNTED = ("server_inflight", "queued_requests")


class AutoLimits:
    """Knows the limits by the names of servers. ``boards`` are the counters of the workers; ``publish`` sends them the changed limits."""

    def __init__(self, config: Callable[[], Config], boards: Iterable[SharedCounters], publish: Callable[[], object]) -> None:
        self._config = config
        self._boards = boards
        self._publish = publish
        self._limits: dict[str, AutoLimit] = {}

    def values(self) -> dict[str, int]:
        """Return the limit of each configured server, and forget the others."""
        self._limits = {server.name: self.limit(server) for server in self._servers(self._config())}
        return {name: limit.value for name, limit in self._limits.items()}

    def limit(self, server: ConfiguredServer) -> AutoLimit:
        """Return the limit of a server."""
        return self._limits.get(server.name) or AutoLimit(limit_bounds(self._config(), server.model).start)

    def observe(self, samples: Mapping[str, tuple[float, EngineMetrics] | None]) -> None:
        """Step the limits by the samples of servers and their times; None for a server whose metrics could not be read."""
        config = self._config()
        counts = sum_series(self._boards, _COUNTED)
        before = self.values()
        for server in self._servers(config):
            if server.name not in samples:
                continue
            limit, found, model = self.limit(server), samples[server.name], server.model
            if found is None:
                self._limits[server.name] = unreachable(limit)
                continue
            in_flight, queued = (
                int(counts.get(Series(family, labels), (0,))[0])
                for family, labels in zip(_COUNTED, ((model.id, server.name), (model.id,)), strict=True)
            )
            sample = LoadSample(*found, in_flight, queued)
            bounds = limit_bounds(config, model)
            is_auto = model.max_inflight == "auto"
            self._limits[server.name] = (
                next_limit(limit, sample, bounds, _objectives(model.slo)) if is_auto else next_part(limit, sample, bounds)
            )
        if self.values() != before:
            self._publish()

    @staticmethod
    def _servers(config: Config) -> Iterator[ConfiguredServer]:
        return (server for server in configured_servers(config) if server.model.max_inflight_follows_load)


def _objectives(slo: conf.Slo | None) -> Objectives:
    return Objectives() if slo is None else Objectives(slo.ttft, slo.itl)
