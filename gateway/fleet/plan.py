"""From the configuration, and what is known of servers, to what workers, launcher and prober are told. Pure.

The rule: every server has one name, made here, by which all parts speak of it: ``MODEL#N`` for a launched one, its
URL for one that was found.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gateway import config as conf
from gateway.config import Config, plain_variables
from gateway.config.redis_url import limits_store
from gateway.fleet.launch_diff import shape
from gateway.snapshot.snapshot import (
    Allowance,
    BodyRules,
    Claims,
    Clients,
    Issuer,
    Key,
    Limits,
    LimitsStore,
    Model,
    Queue,
    Snapshot,
    Tracing,
    weight_of,
)
from gateway.system.logs import LogSettings
from gateway.system.tls import Tls
from upstream.balancing.server import Condition, ServerSpec
from upstream.http import deadlines
from upstream.http.address import Address
from upstream.launcher.lifecycle import LaunchSpec, LaunchState, LaunchStatus
from upstream.vllm.capabilities import capabilities_of, task_of
from upstream.vllm.command_line import Adapter, LaunchSettings, flag_of
from upstream.vllm.health import ServerHealth, Target
from upstream.vllm.presets import with_preset

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


def launched_model(server: str) -> str:
    """The model of a launched server by its name, also of one that the configuration has no more."""
    return server.rpartition("#")[0]


def launches(config: Config) -> tuple[LaunchSpec, ...]:
    """What the launcher is given to start, sooner or later."""
    return tuple(spec for model in config.models for spec in launches_of(config, model))


def launches_of(config: Config, model: conf.Model) -> tuple[LaunchSpec, ...]:
    """A model's replicas; none for one that is not launched here."""
    launch = model.launch
    if launch is None:
        return ()
    return tuple(
        LaunchSpec(f"{model.id}#{number}", _settings(config, model, launch, number), launch.startup_timeout)
        for number in range(launch.replicas)
    )


def relaunched(before: Config, after: Config) -> frozenset[str]:
    """The models whose servers are new in a configuration, or are started in another way than before."""
    shapes = {model.id: shape(launches_of(before, model)) for model in before.models}
    changed = (model.id for model in after.models if model.launch and shape(launches_of(after, model)) != shapes.get(model.id))
    return frozenset(changed)


def may_be_stopped(config: Config, model: conf.Model) -> bool:
    """Whether a model is launched and not always up: it is woken by a request, rests when unused, or makes room for another one."""
    launch = model.launch
    if launch is None:
        return False
    rests = launch.start == "on_demand" or launch.idle_stop is not None or launch.idle_sleep is not None or launch.group is not None
    return rests or any(
        other.launch.start == "on_demand" and gpus(launch) & gpus(other.launch) for other in config.models if other.launch is not None
    )


def gpus(launch: conf.Launch) -> frozenset[int]:
    """The GPUs of all its replicas."""
    return frozenset(gpu for replica in launch.gpus or () for gpu in replica)


def needs(launch: conf.Launch) -> frozenset[int | str]:
    """What no other server can have at the same time: its GPUs, and the place where it is told to listen."""
    args = {flag_of(key): value for key, value in launch.args.items()}
    places = {f"unix:{args['uds']}"} if "uds" in args else {f"{args.get('host', '127.0.0.1')}:{args['port']}"} if "port" in args else set()
    return frozenset[int | str](gpus(launch)) | places


def _settings(config: Config, model: conf.Model, launch: conf.Launch, number: int) -> LaunchSettings:
    return LaunchSettings(
        model=launch.model or model.id,
        served_names=(model.id,),
        command=launch.command,
        args=with_preset(launch.preset, launch.args),
        env=_unredirected(model) | plain_variables(launch.env),
        gpus=launch.gpus[number] if launch.gpus else (),
        adapters=tuple(Adapter(lora.id, lora.path) for lora in model.loras if lora.path is not None),
        sleeps=launch.idle_sleep is not None,
        drain=config.server.drain,
    )


def _unredirected(model: conf.Model) -> dict[str, str]:
    """A host of the list could send vLLM on to one that is not in it, unless vLLM follows no redirects."""
    hosts = model.body.media_hosts
    return {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"} if hosts and not any(host.startswith("*") and "." not in host for host in hosts) else {}


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What control knows of servers at a moment, each by its name. ``keys`` are the internal keys of launched ones; ``away``
    are those that are stopped, asleep, or to take no new requests, ``unready`` those of which it is said that they will take some;
    ``awaited`` are the models whose servers are still looked for."""

    launched: Mapping[str, LaunchStatus]
    probes: Mapping[str, ServerHealth]
    keys: Mapping[str, str]
    away: Set[str] = frozenset()
    unready: Set[str] = frozenset()
    awaited: Set[str] = frozenset()
    key_sets: Mapping[str, bytes] = field(default_factory=dict)
    """By issuer, those that were fetched."""


def build_snapshot(config: Config, known: Knowledge, version: int, created: int) -> Snapshot:
    """What the workers serve by. ``created``: what model lists give as the models' time, in seconds since the epoch."""
    specs: dict[str, list[ServerSpec]] = {model.id: [] for model in config.models}
    for place in places(config):
        if place.server is not None or place.name in known.launched:
            specs[place.model.id].append(_spec(place, known))
    return Snapshot(
        version=version,
        keys=_keys(config),
        models=tuple(each for model in config.models for each in _with_adapters(model, _model(config, model, specs[model.id], created))),
        body_limit=config.server.body_limit,
        body_values=config.server.body_values,
        cors_origins=config.server.cors.origins,
        docs=config.server.docs,
        log_user=config.log.user,
        log_sample=config.log.sample,
        ledger_user=config.ledger is not None and config.ledger.user,
        ledger_metadata=config.ledger is not None and config.ledger.metadata,
        max_inflight=config.server.max_inflight,
        workers=config.server.workers,
        log=log_settings(config),
        tracing=_tracing(config),
        clients=clients(config.server),
        tls=Tls(str(config.server.tls.cert), str(config.server.tls.key)) if config.server.tls else None,
        limits_store=_limits_store(config),
        issuers=tuple(_issuer(issuer, known.key_sets) for issuer in config.jwt),
        teams=_teams(config) if any(issuer.claims.team for issuer in config.jwt) else {},
        default_model=config.default_model,
    )


def clients(server: conf.ServerSection) -> Clients:
    """What is asked of connections. Memory is each worker's share of the whole, but never less than one body needs."""
    return Clients(
        headers_timeout=server.headers_timeout,
        body_timeout=server.body_timeout,
        write_timeout=server.write_timeout,
        body_memory=max(server.body_memory // server.workers, server.body_limit),
        max_per_address=server.max_connections_per_address,
        trusted_proxies=tuple(map(str, server.trusted_proxies)),
    )


def log_settings(config: Config) -> LogSettings:
    """What is said on standard error."""
    return LogSettings(config.log.level, config.log.format, config.log.levels)


def _tracing(config: Config) -> Tracing | None:
    """None, too, where no request would be traced."""
    tracing = config.tracing
    return None if tracing is None or not tracing.sample else Tracing(tracing.endpoint.rstrip("/"), tracing.sample)


def _spec(place: Place, known: Knowledge) -> ServerSpec:
    if place.server is None:
        address = known.launched[place.name].address
        return ServerSpec(place.name, address, place.served_model, known.keys[place.name], keep_idle=KEEP_IDLE_LAUNCHED)
    return ServerSpec(place.name, Address.parse(place.server.url), place.served_model, _secret(place.server), float(place.server.weight))


def _secret(server: conf.Server) -> str | None:
    return server.api_key.get_secret_value() if server.api_key is not None else None


def _queue(config: Config, model: conf.Model) -> Queue | None:
    """What one worker lets wait: its share of the whole, since a client's connection may end up in any of them."""
    waits = model.max_inflight is not None or may_be_stopped(config, model)
    queue = model.queue or (conf.Queue() if waits else None)
    return None if queue is None else Queue(math.ceil(queue.size / config.server.workers), queue.wait)


def _model(config: Config, model: conf.Model, servers: Sequence[ServerSpec], created: int) -> Model:
    timeouts, launch = model.timeouts, model.launch
    args = None if launch is None else with_preset(launch.preset, launch.args)
    return Model(
        id=model.id,
        servers=tuple(servers),
        aliases=model.aliases,
        mounts=model.mounts,
        balance=model.balance,
        timeouts=deadlines.Timeouts(timeouts.connect, timeouts.first_byte, timeouts.idle, timeouts.total),
        queue=_queue(config, model),
        max_inflight=model.max_inflight,
        keepalive=model.keepalive,
        defaults=model.defaults,
        overrides=model.overrides,
        body=BodyRules(model.body.allow, model.body.refuse, model.body.max_n, model.body.max_tokens, model.body.media_hosts),
        fallbacks=model.fallbacks,
        rewrite=model.rewrite_model,
        created=created,
        price=(model.price.prompt, model.price.completion) if model.price is not None else None,
        task=model.task or (None if args is None else task_of(args)),
        capabilities=model.capabilities,
        launched_with=None if args is None else capabilities_of(args),
    )


def _with_adapters(model: conf.Model, base: Model) -> Iterator[Model]:
    """A model and its LoRA adapters, which are asked for like models and served by the same servers."""
    yield base
    for lora in model.loras:
        yield replace(base, id=lora.id, aliases=lora.aliases, mounts=(), parent=model.id, served=lora.id)


def _issuer(issuer: conf.Jwt, key_sets: Mapping[str, bytes]) -> Issuer:
    return Issuer(
        name=issuer.issuer,
        audiences=issuer.audience,
        keys=issuer.keys,
        algorithms=issuer.algorithms,
        key_set=issuer.jwks.keys if issuer.jwks.url is None else key_sets.get(issuer.issuer),
        claims=Claims(**issuer.claims.model_dump()),
        leeway=issuer.leeway,
        limit=issuer.token_limit,
        subjects=issuer.subjects,
    )


def _teams(config: Config) -> dict[str, tuple[Allowance, ...]]:
    return {team.id: tuple(_allowances(f"team {team.id}", team.limits)) for team in config.teams}


def _keys(config: Config) -> tuple[Key, ...]:
    teams = _teams(config)
    return tuple(_key(key, config.isolate_prefix_cache, teams.get(key.team or "", ())) for key in config.keys)


def _allowances(holder: str, limits: conf.Limits | None) -> Iterator[Allowance]:
    """No name has a space in it, so no two holders are called the same."""
    if limits is None:
        return
    amounts = _amounts(limits)
    if amounts != Limits():
        yield Allowance(holder, amounts)
    for row in limits.models:
        yield Allowance(f"{holder} for {' '.join(sorted(row.models))}", _amounts(row), row.models)


def _amounts(limits: conf.Limits | conf.ModelLimits) -> Limits:
    return Limits(*(getattr(limits, name) for name in _AMOUNTS))


_AMOUNTS = tuple(each.name for each in fields(Limits) if each.init)


def _limits_store(config: Config) -> LimitsStore | None:
    if config.limits_store is None:
        return None
    return limits_store(config.limits_store.get_secret_value(), refuses=config.limits.on_store_failure == "refuse")


def _key(key: conf.Key, isolation: conf.PrefixCacheIsolation | None, of_team: tuple[Allowance, ...]) -> Key:
    return Key(
        id=key.id,
        digests=tuple(_digest(one.text) for one in key.hashes),
        ends={_digest(one.text): one.expires.timestamp() for one in key.hashes if one.expires is not None},
        models=None if key.models == ("*",) else key.models,
        expires=key.expires.timestamp() if key.expires is not None else None,
        anonymous=key.anonymous,
        fields=_fields(key, isolation),
        team=key.team,
        labels=key.labels,
        revoked=key.revoked,
        weight=weight_of(key.priority),
        allowances=(*_allowances(f"key {key.id}", key.limits), *of_team),
    )


def _digest(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("sha256:"))


def _fields(key: conf.Key, isolation: conf.PrefixCacheIsolation | None) -> dict[str, Any]:
    """What each request of a key is sent with. The salt is the same in all workers and after a restart, and tells nothing of the secret."""
    fields: dict[str, Any] = {} if key.priority is None else {"priority": key.priority}
    if isolation is not None:
        secret = isolation.secret.get_secret_value().encode()
        fields["cache_salt"] = hmac.new(secret, key.id.encode(), hashlib.sha256).hexdigest()
    return fields


def targets(config: Config, known: Knowledge) -> tuple[Target, ...]:
    """What the prober probes: every found server that may serve, and the launched ones once they have been ready."""
    silent = known.away | known.unready
    found = [
        Target(place.name, Address.parse(place.server.url), _secret(place.server))
        for place in places(config)
        if place.server and place.name not in silent
    ]
    ready = [status for status in known.launched.values() if status.state is LaunchState.READY]
    return (*found, *(Target(status.name, status.address, known.keys[status.name]) for status in ready))


def ready_servers(config: Config, known: Knowledge) -> dict[str, int]:
    """How many servers of each model take requests; every model of the configuration is in it."""
    ready = {model.id: 0 for model in config.models}
    for place in places(config):
        ready[place.model.id] += condition(place.name, known) is Condition.UP
    return ready


_LAUNCHED = {LaunchState.STARTING: Condition.LOADING, LaunchState.READY: Condition.UP}


def conditions(config: Config, known: Knowledge) -> dict[str, Condition]:
    """What workers are told of each server."""
    return {place.name: condition(place.name, known) for place in places(config)}


def condition(name: str, known: Knowledge) -> Condition:
    """A launched server is loading until it was ready, and from then on what its probes say, as a found one is."""
    if name in known.away:
        return Condition.OUT_OF_ROTATION
    if name in known.unready:
        return Condition.LOADING
    status, probe = known.launched.get(name), known.probes.get(name)
    if status is not None and (status.state is not LaunchState.READY or probe is None):
        return _LAUNCHED.get(status.state, Condition.DOWN)
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


def tasks(config: Config, known: Knowledge) -> dict[str, str]:
    """What each model and its adapters are for, where the servers' routes tell it and all of them agree."""
    found: dict[str, set[str]] = {}
    for place in places(config):
        probe = known.probes.get(place.name)
        if probe is not None and probe.task is not None:
            for name in (place.model.id, *(lora.id for lora in place.model.loras)):
                found.setdefault(name, set()).add(probe.task)
    return {model: each.pop() for model, each in found.items() if len(each) == 1}


def unconcluded(config: Config, known: Knowledge) -> list[str]:
    """The servers whose first start, or first probe, has had no result yet, and the models whose servers are still looked for."""
    return [*(place.name for place in places(config) if not _concluded(place, known)), *sorted(known.awaited)]


def _concluded(place: Place, known: Knowledge) -> bool:
    """One that is started on demand counts from the beginning, as does one that was stopped again, or that comes and goes."""
    launch, status = place.model.launch, known.launched.get(place.name)
    if place.model.discover is not None or place.name in known.away or (launch is not None and launch.start == "on_demand"):
        return True
    return status.first_start_finished if status is not None else place.name in known.probes


def by_name(statuses: Iterable[LaunchStatus]) -> dict[str, LaunchStatus]:
    return {status.name: status for status in statuses}
