"""The models with discovered servers: their sources, and the configuration with the servers that were found.

A configuration is *read* from its files and *filled* with discovered servers. Its models then have ``servers`` as if they were written in
the file, and the other parts of the gateway do not need to know about discovery. Pure, except for ``Discovery``, which holds the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.configured_servers import configured_servers
from gateway.telemetry.dependencies import Observation
from upstream.discovery.dns import DnsName
from upstream.discovery.endpoints import Endpoint, EndpointState
from upstream.discovery.kubernetes import Service
from upstream.discovery.sources import DiscoveryStatus, Source, Sources
from upstream.vllm.health import ServerHealth

_NOTHING = DiscoveryStatus()


def source_of(discover: conf.Discover) -> Source:
    """Return the source of a model's servers."""
    if discover.kubernetes is not None:
        service = discover.kubernetes
        return Service(service.service, service.namespace, service.port)
    assert discover.dns is not None, "the configuration has been checked"
    return DnsName(discover.dns.name, discover.dns.port, discover.dns.interval)


def discovered_models(config: Config) -> Iterator[tuple[conf.Model, conf.Discover]]:
    """Yield the models with discovered servers."""
    return ((model, model.discover) for model in config.models if model.discover is not None)


def _filled(model: conf.Model, findings: Mapping[str, DiscoveryStatus]) -> conf.Model:
    if (discover := model.discover) is None:
        return model
    servers = tuple(
        conf.Server.model_construct(url=endpoint.url, model=discover.model, api_key=discover.api_key, weight=1)
        for endpoint in findings[model.id].endpoints
    )
    return model.model_copy(update={"servers": servers})


@dataclass(frozen=True, slots=True)
class ServerChange:
    """How the discovered servers of a model changed: the numbers of added, removed and current servers."""

    model: str
    added: int
    removed: int
    total: int


def server_changes(before: Config, after: Config) -> Iterator[ServerChange]:
    """Yield the differences between two filled configurations, for each model with discovered servers."""
    known = {model.id: _urls(model) for model, _ in discovered_models(before)}
    for model, _ in discovered_models(after):
        was, now = known.get(model.id, frozenset()), _urls(model)
        if was != now:
            yield ServerChange(model.id, len(now - was), len(was - now), len(now))


def _urls(model: conf.Model) -> frozenset[str]:
    return frozenset(server.url for server in model.servers or ())


class Discovery:
    """The discovered servers for control: the filled configuration, their states, and the models without a result."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._had_result: set[str] = set()
        self.states: dict[str, EndpointState] = {}
        """The states of the discovered servers, by server name."""

    def set_sources(self, *configs: Config) -> None:
        """Watch the sources of these configurations, and no others."""
        self._sources.set_sources(source_of(discover) for config in configs for _, discover in discovered_models(config))

    def has_results(self, config: Config) -> bool:
        """Return whether every source of a configuration has responded, or failed, at least once."""
        return all(finding.first_result for _, finding in self._findings(config))

    def fill(self, read: Config) -> Config:
        """Return a configuration with the servers that are known now, or itself if no model has discovered servers."""
        findings = dict(self._findings(read))
        return read.model_copy(update={"models": tuple(_filled(model, findings) for model in read.models)}) if findings else read

    def use(self, config: Config) -> None:
        """Use the states of a filled configuration's servers from now on."""
        known = {(model, endpoint.url): endpoint.state for model, finding in self._findings(config) for endpoint in finding.endpoints}
        self.states = {
            server.name: known[server.model.id, server.external.url]
            for server in configured_servers(config)
            if server.external is not None and server.model.discover is not None
        }
        self._had_result &= {model.id for model, _ in discovered_models(config)}

    def named(self, state: EndpointState) -> Set[str]:
        """Return the servers with this endpoint state."""
        return {name for name, each in self.states.items() if each is state}

    def may_be_undiscovered(self, config: Config) -> bool:
        """Return whether ``undiscovered`` may return any model. It is cheaper."""
        return any(model.id not in self._had_result for model, _ in discovered_models(config))

    def undiscovered(self, config: Config, probes: Mapping[str, ServerHealth]) -> Set[str]:
        """Return the models for which the result of discovery is not known yet.

        A model with a result is never returned again. Its servers may change without an effect on the gateway's readiness.
        """
        if not self.may_be_undiscovered(config):
            return frozenset()
        checked = {server.model.id for server in configured_servers(config) if server.name in probes}
        known = ((model, finding.endpoints) for model, finding in self._findings(config) if finding.first_result)
        self._had_result |= {model for model, endpoints in known if model in checked or not _is_any_ready(endpoints)}
        return {model.id for model, _ in discovered_models(config)} - self._had_result

    def well(self, config: Config) -> Iterator[tuple[str, bool]]:
        """Yield, for each model with discovered servers, whether its source responds without a problem."""
        return ((model, finding.first_result and not finding.problem) for model, finding in self._findings(config))

    def dependencies(self, config: Config) -> Iterator[Observation]:
        """Yield the source of each model with discovered servers, once it has responded or failed."""
        findings = ((model, finding) for model, finding in self._findings(config) if finding.first_result)
        return (Observation("discovery", model, finding.problem or None) for model, finding in findings)

    def as_json(self, model: conf.Model) -> dict[str, Any] | None:
        """Return a model's source as /status shows it, None for a model without discovery."""
        if model.discover is None:
            return None
        finding = self._sources.statuses().get(source_of(model.discover), _NOTHING)
        return {
            "source": str(source_of(model.discover)),
            "endpoints": len(finding.endpoints),
            "problem": finding.problem,
            "since": finding.since,
        }

    def _findings(self, config: Config) -> Iterator[tuple[str, DiscoveryStatus]]:
        findings = self._sources.statuses()
        return ((model.id, findings.get(source_of(discover), _NOTHING)) for model, discover in discovered_models(config))


def _is_any_ready(endpoints: Iterable[Endpoint]) -> bool:
    return any(endpoint.state is EndpointState.READY for endpoint in endpoints)
