"""The models whose servers come and go: what of the configuration says where they are, and what it is with those that were found.

A configuration is *read* from its files and *filled* with what was found: then its models have ``servers`` as if they had been
written there, and every other part of the gateway need not know of discovery. Pure, but for ``Discovery``, which holds the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from gateway import config as conf
from gateway.config import Config
from gateway.fleet import plan
from gateway.telemetry.dependencies import Observation
from upstream.discovery import DiscoveryStatus, DnsName, Endpoint, EndpointState, Service, Source, Sources
from upstream.vllm.health import ServerHealth

_NOTHING = DiscoveryStatus()


def source_of(discover: conf.Discover) -> Source:
    """Where a model's servers are looked for."""
    if discover.kubernetes is not None:
        service = discover.kubernetes
        return Service(service.service, service.namespace, service.port)
    assert discover.dns is not None, "the configuration has been checked"
    return DnsName(discover.dns.name, discover.dns.port, discover.dns.interval)


def discovered(config: Config) -> Iterator[tuple[conf.Model, conf.Discover]]:
    """The models whose servers are found."""
    return ((model, model.discover) for model in config.models if model.discover is not None)


def filled(read: Config, findings: Mapping[Source, DiscoveryStatus]) -> Config:
    """The configuration with the servers that were found; itself where none are looked for."""
    if not any(discovered(read)):
        return read
    return read.model_copy(update={"models": tuple(_filled(model, findings) for model in read.models)})


def _filled(model: conf.Model, findings: Mapping[Source, DiscoveryStatus]) -> conf.Model:
    if model.discover is None:
        return model
    endpoints = findings.get(source_of(model.discover), _NOTHING).endpoints
    return model.model_copy(update={"servers": tuple(_server(model.discover, each.url) for each in endpoints)})


def _server(discover: conf.Discover, url: str) -> conf.Server:
    return conf.Server.model_construct(url=url, model=discover.model, api_key=discover.api_key, weight=1)


def standings(config: Config, findings: Mapping[Source, DiscoveryStatus]) -> dict[str, EndpointState]:
    """By its name, how every server of a filled configuration stands that was found."""
    known = {
        (model.id, endpoint.url): endpoint.state
        for model, discover in discovered(config)
        for endpoint in findings.get(source_of(discover), _NOTHING).endpoints
    }
    return {
        place.name: known[place.model.id, place.server.url]
        for place in plan.places(config)
        if place.server is not None and place.model.discover is not None
    }


@dataclass(frozen=True, slots=True)
class Change:
    """What is different about a model's servers: so many are new, so many gone, and so many there now."""

    model: str
    new: int
    gone: int
    total: int


def changes(before: Config, after: Config) -> Iterator[Change]:
    """What is different between two filled configurations, for each model whose servers are found."""
    former = {model.id: _urls(model) for model, _ in discovered(before)}
    for model, _ in discovered(after):
        was, now = former.get(model.id, frozenset()), _urls(model)
        if was != now:
            yield Change(model.id, len(now - was), len(was - now), len(now))


def _urls(model: conf.Model) -> frozenset[str]:
    return frozenset(server.url for server in model.servers or ())


class Discovery:
    """What is found, for control: the filled configuration, how its servers stand, and for which models nothing is known yet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._settled: set[str] = set()
        self._standings: dict[str, EndpointState] = {}

    def look_for(self, *configs: Config) -> None:
        """Look for the servers of these configurations, and for no others."""
        self._sources.set_sources(source_of(discover) for config in configs for _, discover in discovered(config))

    def has_answers(self, config: Config) -> bool:
        """Whether every source of a configuration has answered, or failed, at least once."""
        findings = self._sources.statuses()
        return all(findings.get(source_of(discover), _NOTHING).first_result for _, discover in discovered(config))

    def fill(self, read: Config) -> Config:
        """A configuration with the servers that are known now."""
        return filled(read, self._sources.statuses())

    def serve(self, config: Config) -> None:
        """Remember how the servers of a filled configuration stand, by which workers are told from now on."""
        self._standings = standings(config, self._sources.statuses())
        self._settled &= {model.id for model, _ in discovered(config)}

    def standing(self, name: str) -> EndpointState | None:
        """How a server stands; None for one that was not found."""
        return self._standings.get(name)

    def named(self, standing: EndpointState) -> Set[str]:
        """The servers that stand so."""
        return {name for name, each in self._standings.items() if each is standing}

    def waits(self, config: Config) -> bool:
        """Whether ``awaited`` may have any."""
        return any(model.id not in self._settled for model, _ in discovered(config))

    def awaited(self, config: Config, probes: Mapping[str, ServerHealth]) -> Set[str]:
        """The models of which it is not known yet whether they are served. One that was once known never comes back here: its servers
        come and go, and the gateway is ready nevertheless."""
        waiting = {model.id: discover for model, discover in discovered(config) if model.id not in self._settled}
        if not waiting:
            return frozenset()
        findings = self._sources.statuses()
        probed = {place.model.id for place in plan.places(config) if place.name in probes}
        for model, discover in waiting.items():
            finding = findings.get(source_of(discover), _NOTHING)
            if finding.first_result and (model in probed or not _any_ready(finding.endpoints)):
                self._settled.add(model)
        return waiting.keys() - self._settled

    def well(self, config: Config) -> Iterator[tuple[str, bool]]:
        """For each model whose servers are found, whether its source has answered and there is nothing wrong with it."""
        findings = self._sources.statuses()
        for model, discover in discovered(config):
            finding = findings.get(source_of(discover), _NOTHING)
            yield model.id, finding.first_result and not finding.problem

    def dependencies(self, config: Config) -> Iterator[Observation]:
        """The source of each model whose servers are found, once it has answered or failed."""
        findings = self._sources.statuses()
        for model, discover in discovered(config):
            finding = findings.get(source_of(discover), _NOTHING)
            if finding.first_result:
                yield Observation("discovery", model.id, finding.problem or None)

    def shown(self, model: conf.Model) -> dict[str, Any] | None:
        """A model's source as /status shows it; None where the servers are not found."""
        if model.discover is None:
            return None
        source = source_of(model.discover)
        finding = self._sources.statuses().get(source, _NOTHING)
        return {"source": str(source), "endpoints": len(finding.endpoints), "problem": finding.problem, "since": finding.since}


def _any_ready(endpoints: Iterable[Endpoint]) -> bool:
    return any(endpoint.state is EndpointState.READY for endpoint in endpoints)
