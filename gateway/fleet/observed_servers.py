"""Derive the servers' conditions, their health-check targets and the models' maximum lengths from an observation of control. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeVar

from gateway import config as conf
from gateway.config import Config
from gateway.config.problems import one_line
from gateway.fleet.configured_servers import ConfiguredServer, configured_servers
from upstream.balancing.server import Condition
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.vllm.health import ProbeTarget, ServerHealth

T = TypeVar("T")
_SHOWN_MODELS, _SHOWN_CHARACTERS = 5, 100  # of a list of models in an explanation
_LAUNCHED = {LaunchState.STARTING: Condition.LOADING, LaunchState.READY: Condition.UP}


@dataclass(frozen=True, slots=True)
class ObservedServers:
    """An observation of all servers at one time, by server name.

    ``api_keys`` are the internal keys of launched servers. ``out_of_rotation`` are servers that are stopped, asleep or draining.
    ``unready`` are discovered servers that are reported as not ready. ``undiscovered`` are the IDs of models whose discovery has had no
    result yet. ``key_sets`` are the fetched JWKS by issuer.
    """

    launched: Mapping[str, LaunchStatus]
    probes: Mapping[str, ServerHealth]
    api_keys: Mapping[str, str]
    out_of_rotation: Set[str] = frozenset()
    unready: Set[str] = frozenset()
    hung: Set[str] = frozenset()
    undiscovered: Set[str] = frozenset()
    key_sets: Mapping[str, bytes] = field(default_factory=dict)

    def condition(self, name: str) -> Condition:
        """Return the condition of a server.

        A launched server is loading until it is ready. Afterwards its health checks decide, as for an external server.
        """
        if name in self.out_of_rotation:
            return Condition.OUT_OF_ROTATION
        if name in self.unready:
            return Condition.LOADING
        status, probe = self.launched.get(name), self.probes.get(name)
        if status is not None and (status.state is not LaunchState.READY or probe is None):
            return _LAUNCHED.get(status.state, Condition.DOWN)
        if probe is None:
            return Condition.LOADING
        return Condition.UP if probe.up and name not in self.hung else Condition.DOWN


def conditions(config: Config, observed: ObservedServers) -> dict[str, Condition]:
    """Return the condition of every server of the configuration, as workers get it."""
    return {server.name: observed.condition(server.name) for server in configured_servers(config)}


def ready_servers(config: Config, observed: ObservedServers) -> dict[str, int]:
    """Return the number of servers of each model that accept requests. The result has every model but the splits."""
    ready = {model.id: 0 for model in config.served_models}
    for server in configured_servers(config):
        ready[server.model.id] += observed.condition(server.name) is Condition.UP
    return ready


def health_check_targets(config: Config, observed: ObservedServers) -> tuple[ProbeTarget, ...]:
    """Return what the prober checks: every external server in rotation, and every launched server that became ready."""
    unchecked = observed.out_of_rotation | observed.unready
    external = [
        ProbeTarget(server.name, server.external.address, api_key_of(server.external))
        for server in configured_servers(config)
        if server.external and server.name not in unchecked
    ]
    ready = [status for status in observed.launched.values() if status.state is LaunchState.READY]
    return (*external, *(ProbeTarget(status.name, status.address, observed.api_keys[status.name]) for status in ready))


def api_key_of(server: conf.Server) -> str | None:
    """Return the key that an external server requires, or None."""
    return server.api_key.get_secret_value() if server.api_key is not None else None


def max_model_len(config: Config, observed: ObservedServers) -> dict[str, int]:
    """Return the context length of each model and adapter whose servers report one: the smallest of theirs, in tokens.

    A split has the smallest context length of its models, if all are known.
    """
    lengths: dict[str, list[int]] = {}
    for server in configured_servers(config):
        probe = observed.probes.get(server.name)
        for card in probe.models if probe else ():
            if card.id == server.served_model and card.max_model_len is not None:
                for entry in server.model.entries:
                    lengths.setdefault(entry.id, []).append(card.max_model_len)
    known = {model: min(values) for model, values in lengths.items()}
    return known | {split: min(values) for split, values in _of_splits(config, known).items()}


def wrong_models(server: ConfiguredServer, observed: ObservedServers) -> str | None:
    """Explain which other models a server lists; empty if it lists its model, None if it is not up or lists no model.

    The names are text of the server, so they are shortened and escaped.
    """
    probe = observed.probes.get(server.name)
    if probe is None or not probe.models or observed.condition(server.name) is not Condition.UP:
        return None
    if any(card.id == server.served_model for card in probe.models):
        return ""
    names = [one_line(card.id[:_SHOWN_CHARACTERS]) for card in probe.models[:_SHOWN_MODELS]]
    more = ", …" if len(probe.models) > _SHOWN_MODELS else ""
    setting = "servers[].model" if server.model.discover is None else "discover.model"
    return f"serves only [{', '.join(names)}{more}] and not {server.served_model}: set {setting}"


def models_served(config: Config, observed: ObservedServers) -> Iterator[tuple[ConfiguredServer, str]]:
    """Yield each server whose models are known, with what ``wrong_models`` explains."""
    for server in configured_servers(config):
        if (wrong := wrong_models(server, observed)) is not None:
            yield server, wrong


def tasks(config: Config, observed: ObservedServers) -> dict[str, str]:
    """Return the task of each model, adapter and split if its servers' routes show it and all servers agree."""
    found: dict[str, set[str]] = {}
    for server in configured_servers(config):
        probe = observed.probes.get(server.name)
        if probe is not None and probe.task is not None:
            for entry in server.model.entries:
                found.setdefault(entry.id, set()).add(probe.task)
    known = {model: each.pop() for model, each in found.items() if len(each) == 1}
    return known | {split: values[0] for split, values in _of_splits(config, known).items() if len(set(values)) == 1}


def loaded_models(config: Config, observed: ObservedServers) -> dict[str, str]:
    """Return the models that servers have loaded, as those that the gateway does not launch report them."""
    return {
        server.name: f"{card.root}, {card.max_model_len} tokens"
        for server in configured_servers(config)
        if server.external and (probe := observed.probes.get(server.name)) is not None
        for card in probe.models
        if card.id == server.served_model
    }


def with_scale_out(observed: ObservedServers) -> frozenset[str]:
    """Return the servers that have vLLM's scale-out routes."""
    return frozenset(name for name, probe in observed.probes.items() if probe.scale_out)


def _of_splits(config: Config, known: Mapping[str, T]) -> dict[str, list[T]]:
    """Return the values of the models of each split, for splits whose models all have one."""
    ids = config.model_ids
    splits = {model.id: [ids[name] for name in model.split] for model in config.models if model.split}
    return {split: [known[target] for target in targets] for split, targets in splits.items() if known.keys() >= set(targets)}


def without_first_result(config: Config, observed: ObservedServers) -> list[str]:
    """Return the servers whose first start or first health check has no result yet, and the models that wait for discovery."""
    servers = (server.name for server in configured_servers(config) if not _has_result(server, observed))
    return [*servers, *sorted(observed.undiscovered)]


def _has_result(server: ConfiguredServer, observed: ObservedServers) -> bool:
    launch, status = server.model.launch, observed.launched.get(server.name)
    # A server that starts on demand, is out of rotation or is discovered at runtime never delays the gateway's readiness.
    if server.model.discover is not None or server.name in observed.out_of_rotation or (launch is not None and launch.start == "on_demand"):
        return True
    return status.first_start_finished if status is not None else server.name in observed.probes
