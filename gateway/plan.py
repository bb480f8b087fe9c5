"""From the configuration, and what is known of servers, to what relays, launcher and prober are told. Pure.

The rule: every server has one name, made here, by which all parts speak of it: ``MODEL#N`` for a launched one, its
URL for one that was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway import config as conf
from gateway.config import Config, plain_variables
from gateway.state import Key, Model, State
from upstream import deadlines
from upstream.address import Address
from upstream.health import Probe, Target
from upstream.launcher import LaunchSpec, Snapshot
from upstream.launcher import State as Stage
from upstream.policy import POLICIES
from upstream.server import Condition, ServerSpec
from upstream.vllm import Adapter, LaunchSettings

KEEP_IDLE_LAUNCHED = 60.0
"""Seconds: below the 75 for which a launched server keeps an idle connection; a found one keeps vLLM's 5."""


@dataclass(frozen=True, slots=True)
class Place:
    """One server of one model, as the configuration has it: launched, or found under a URL."""

    name: str
    model: conf.Model
    server: conf.Server | None = None

    @property
    def served_model(self) -> str:
        """The name under which the server knows the model."""
        return (self.server.model if self.server else None) or self.model.id


def places(config: Config) -> tuple[Place, ...]:
    """Every server of the configuration, in its order."""
    urls = Counter(server.url for model in config.models for server in model.servers or ())
    return tuple(place for model in config.models for place in _places_of(model, urls))


def _places_of(model: conf.Model, urls: Mapping[str, int]) -> Iterator[Place]:
    if model.launch is not None:
        yield from (Place(f"{model.id}#{number}", model) for number in range(model.launch.replicas))
    for server in model.servers or ():
        yield Place(server.url if urls[server.url] == 1 else f"{server.url}#{model.id}", model, server)


def launches(config: Config) -> tuple[LaunchSpec, ...]:
    """What the launcher starts."""
    return tuple(
        LaunchSpec(place.name, _settings(place.model, number), place.model.launch.startup_timeout)
        for model in config.models
        if model.launch is not None
        for number, place in enumerate(place for place in _places_of(model, {}) if place.server is None)
        if place.model.launch is not None
    )


def _settings(model: conf.Model, number: int) -> LaunchSettings:
    launch = model.launch
    assert launch is not None
    return LaunchSettings(
        model=launch.model or model.id,
        served_names=(model.id,),
        command=launch.command,
        args=launch.args,
        env=plain_variables(launch.env),
        gpus=launch.gpus[number] if launch.gpus else (),
        adapters=tuple(Adapter(lora.id, lora.path) for lora in model.loras if lora.path is not None),
    )


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What control knows of servers at a moment, each by its name. ``keys`` are the internal keys of launched ones."""

    snapshots: Mapping[str, Snapshot]
    probes: Mapping[str, Probe]
    keys: Mapping[str, str]


def state(config: Config, known: Knowledge, generation: int, created: int) -> State:
    """What the relays serve by. ``created``: what model lists give as the models' time, in seconds since the epoch."""
    specs: dict[str, list[ServerSpec]] = {model.id: [] for model in config.models}
    for place in places(config):
        if place.server is not None or place.name in known.snapshots:
            specs[place.model.id].append(_spec(place, known))
    return State(
        generation=generation,
        keys=tuple(_key(key) for key in config.keys),
        models=tuple(each for model in config.models for each in _with_adapters(model, _model(model, specs[model.id], created))),
        body_limit=config.server.body_limit,
        cors_origins=config.server.cors.origins,
        log_user=config.log.user,
    )


def _spec(place: Place, known: Knowledge) -> ServerSpec:
    if place.server is None:
        address = known.snapshots[place.name].address
        return ServerSpec(place.name, address, place.served_model, known.keys[place.name], keep_idle=KEEP_IDLE_LAUNCHED)
    return ServerSpec(place.name, Address.parse(place.server.url), place.served_model, _secret(place.server), float(place.server.weight))


def _secret(server: conf.Server) -> str | None:
    return server.api_key.get_secret_value() if server.api_key is not None else None


def _model(model: conf.Model, servers: Sequence[ServerSpec], created: int) -> Model:
    timeouts = model.timeouts
    return Model(
        id=model.id,
        servers=tuple(servers),
        aliases=model.aliases,
        mounts=model.mounts,
        balance=model.balance if model.balance in POLICIES else "least_busy",
        timeouts=deadlines.Timeouts(timeouts.connect, timeouts.first_byte, timeouts.idle, timeouts.total),
        defaults=model.defaults,
        overrides=model.overrides,
        created=created,
    )


def _with_adapters(model: conf.Model, base: Model) -> Iterator[Model]:
    """A model and its LoRA adapters, which are asked for like models and served by the same servers."""
    yield base
    for lora in model.loras:
        yield replace(base, id=lora.id, aliases=lora.aliases, mounts=(), parent=model.id, served=lora.id)


def _key(key: conf.Key) -> Key:
    return Key(
        id=key.id,
        digests=tuple(bytes.fromhex(value.removeprefix("sha256:")) for value in key.hashes),
        models=None if key.models == ("*",) else key.models,
        expires=key.expires.timestamp() if key.expires is not None else None,
        anonymous=key.anonymous,
    )


def targets(config: Config, known: Knowledge) -> tuple[Target, ...]:
    """What the prober probes: every found server, and the launched ones once they have been ready."""
    found = [Target(place.name, Address.parse(place.server.url), _secret(place.server)) for place in places(config) if place.server]
    ready = [snapshot for snapshot in known.snapshots.values() if snapshot.state is Stage.READY]
    return (*found, *(Target(snapshot.name, snapshot.address, known.keys[snapshot.name]) for snapshot in ready))


_LAUNCHED = {Stage.STARTING: Condition.LOADING, Stage.READY: Condition.UP}


def conditions(config: Config, known: Knowledge) -> dict[str, Condition]:
    """What relays are told of each server."""
    return {place.name: standing(place, known) for place in places(config)}


def standing(place: Place, known: Knowledge) -> Condition:
    """A server's condition; one that the operator has stopped is down."""
    stopped = place.server is None and place.name not in known.snapshots
    return Condition.DOWN if stopped else condition(place.name, known)


def model_state(places: Sequence[Place], known: Knowledge) -> str:
    """A model's state in one word: what the best of its servers is in."""
    conditions = [standing(place, known) for place in places]
    if Condition.UP in conditions:
        return "ready"
    stages = [known.snapshots[place.name].state for place in places if place.name in known.snapshots]
    if Stage.STARTING in stages or (not stages and Condition.LOADING in conditions):
        return "starting"
    if all(stage in (Stage.STOPPING, Stage.STOPPED) for stage in stages) and places[0].server is None:
        return "draining" if stages else "stopped"
    return "failed"


def condition(name: str, known: Knowledge) -> Condition:
    """A launched server is loading until it was ready, and from then on what its probes say, as a found one is."""
    snapshot, probe = known.snapshots.get(name), known.probes.get(name)
    if snapshot is not None and (snapshot.state is not Stage.READY or probe is None):
        return _LAUNCHED.get(snapshot.state, Condition.DOWN)
    if probe is None:
        return Condition.LOADING
    return Condition.UP if probe.up else Condition.DOWN


def max_model_len(config: Config, known: Knowledge) -> dict[str, int]:
    """The context length of each model and of its adapters where the servers tell it: the smallest of theirs."""
    lengths: dict[str, list[int]] = {}
    for place in places(config):
        probe = known.probes.get(place.name)
        for card in probe.models if probe else ():
            if card.id == place.served_model and card.max_model_len is not None:
                for name in (place.model.id, *(lora.id for lora in place.model.loras)):
                    lengths.setdefault(name, []).append(card.max_model_len)
    return {model: min(values) for model, values in lengths.items()}


def unconcluded(config: Config, known: Knowledge) -> list[str]:
    """The servers whose first start, or first probe, has had no result yet."""
    return [place.name for place in places(config) if not _concluded(place, known)]


def _concluded(place: Place, known: Knowledge) -> bool:
    """What the operator has stopped is not waited for."""
    snapshot = known.snapshots.get(place.name)
    if snapshot is None:
        return place.server is None or place.name in known.probes
    return snapshot.concluded or snapshot.state in (Stage.STOPPING, Stage.STOPPED)


def by_name(snapshots: Iterable[Snapshot]) -> dict[str, Snapshot]:
    return {snapshot.name: snapshot for snapshot in snapshots}
