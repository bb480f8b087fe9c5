"""Build the snapshot that workers serve from the configuration and the observed servers. Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

from gateway import config as conf
from gateway.config import Config
from gateway.config.quantities import window_seconds
from gateway.config.redis_url import limits_store
from gateway.config.section import Section
from gateway.fleet.configured_servers import ConfiguredServer, configured_servers, limit_bounds
from gateway.fleet.observed_servers import ObservedServers, api_key_of
from gateway.limits.end_users import each_user
from gateway.sign_in.settings import session_rules
from gateway.snapshot import snapshot
from gateway.snapshot.key_properties import PROPERTIES
from gateway.snapshot.money import Price
from gateway.system.logs import LogSettings
from upstream.balancing.server import ServerSpec
from upstream.http import deadlines
from upstream.vllm.capabilities import capabilities_of, task_of
from upstream.vllm.presets import with_preset

T = TypeVar("T")
KEEP_IDLE_LAUNCHED = 60.0
"""Seconds for which an idle connection to a launched server is kept: less than the server's own 75. Other servers have vLLM's 5."""


def build_snapshot(config: Config, observed: ObservedServers, version: int, created: int) -> snapshot.Snapshot:
    """Build the snapshot. ``created`` is the creation time of every model in model lists, in seconds since the epoch."""
    specs: dict[str, list[ServerSpec]] = {model.id: [] for model in config.models}
    for server in configured_servers(config):
        if server.external is not None or server.name in observed.launched:
            specs[server.model.id].append(_server(server, observed))
    models = [each for model in config.models for each in _with_adapters(model, _model(config, model, specs[model.id], created))]
    return _made(
        snapshot.Snapshot,
        config.server,
        version=version,
        keys=_keys(config),
        models=tuple(_with_common_facts(each, models) if each.split else each for each in models),
        cors_origins=config.server.cors.origins,
        log_user=config.log.user,
        log_sample=config.log.sample,
        ledger_user=config.ledger is not None and config.ledger.user,
        ledger_metadata=config.ledger is not None and config.ledger.metadata,
        bill_cancelled_prefill=config.ledger is not None and config.ledger.bill_cancelled_prefill,
        log=log_settings(config),
        tracing=_tracing(config),
        clients=client_limits(config.server),
        tls=config.server.tls.files if config.server.tls else None,
        limits_store=_limits_store(config),
        issuers=tuple(_issuer(issuer, observed.key_sets) for issuer in config.jwt),
        teams=_teams(config) if any(issuer.claims.team for issuer in config.jwt) else {},
        team_weights={team.id: team.weight for team in config.teams if team.weight != 1.0},
        classes=tuple(_made(snapshot.QueueClass, each, name=each.id, slo=_slo(each.slo)) for each in config.classes),
        default_model=config.default_model,
        warn_at=config.limits.warn_at,
        has_store=config.store is not None,
        recording=None if config.record is None else recording(config.record),
        sessions=None if config.sign_in is None else session_rules(config.sign_in, "data"),
    )


def _made(kind: type[T], section: Section, **converted: Any) -> T:
    """Return a value of the snapshot whose fields have the settings of the same names, as they are written, except for ``converted``."""
    names = _common_fields(kind, type(section))  # type: ignore[arg-type]  # a class is hashable, which mypy does not see
    return kind(**{name: getattr(section, name) for name in names} | converted)


@cache
def _common_fields(kind: type, section: type[Section]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.name in section.model_fields)


def client_limits(server: conf.ServerSection) -> snapshot.Clients:
    """Return the limits of client connections. Body memory is a worker's share of the total, but at least one body of maximum size."""
    return _made(
        snapshot.Clients,
        server,
        body_memory=max(server.body_memory // server.workers, server.body_limit),
        max_per_address=server.max_connections_per_address,
        trusted_proxies=tuple(map(str, server.trusted_proxies)),
    )


def log_settings(config: Config) -> LogSettings:
    """Return the settings of the log."""
    return LogSettings(config.log.level, config.log.format, config.log.levels)


def recording(record: conf.Record) -> snapshot.Recording:
    """Return which requests are recorded, and where."""
    return _made(snapshot.Recording, record, encryption_keys=record.encryption_keys, credentials=record.credentials)


def _tracing(config: Config) -> snapshot.Tracing | None:
    tracing = config.tracing
    return None if tracing is None or not tracing.sample else snapshot.Tracing(tracing.endpoint.rstrip("/"), tracing.sample)


def _server(server: ConfiguredServer, observed: ObservedServers) -> ServerSpec:
    if server.external is None:
        address, api_key = observed.launched[server.name].address, observed.api_keys[server.name]
        launch = server.model.launch
        loads = server.model.id if launch is None or launch.model is None else str(launch.model)
        return ServerSpec(server.name, address, server.served_model, api_key, keep_idle=KEEP_IDLE_LAUNCHED, loads=loads)
    external = server.external
    return ServerSpec(server.name, external.address, server.served_model, api_key_of(external), float(external.weight))


def _queue(config: Config, model: conf.Model) -> snapshot.Queue | None:
    """Return the queue limits of one worker: its share of the total, since any worker may get a client's connection.

    Servers that were just configured are not known to be up before their first health check, so requests wait for its result.
    """
    has_default = bool(model.servers) or model.max_inflight is not None or config.may_stop(model)
    queue = model.queue or (conf.Queue() if has_default else None)
    return None if queue is None else _made(snapshot.Queue, queue, size=math.ceil(queue.size / config.server.workers))


def _slo(slo: conf.Slo | None) -> snapshot.Slo:
    return snapshot.Slo() if slo is None else _made(snapshot.Slo, slo)


def _model(config: Config, model: conf.Model, servers: Sequence[ServerSpec], created: int) -> snapshot.Model:
    timeouts, launch = model.timeouts, model.launch
    args = None if launch is None else with_preset(launch.preset, launch.args)
    return _made(
        snapshot.Model,
        model,
        servers=tuple(servers),
        policy=model.policy,
        timeouts=deadlines.Timeouts(timeouts.connect, timeouts.first_byte, timeouts.idle, timeouts.total),
        queue=_queue(config, model),
        slo=_slo(model.slo),
        max_inflight=limit_bounds(config, model).start if model.max_inflight_follows_load else model.max_inflight,
        has_auto_max_inflight=model.max_inflight_follows_load,
        body=_made(snapshot.BodyRules, model.body),
        rewrite=model.rewrite_model,
        resume=snapshot.Resume(model.resume or "off"),
        created=created,
        price=None if model.price is None else _price(model.price),
        task=model.task or (None if args is None else task_of(args)),
        launched_with=None if args is None else capabilities_of(args),
        mirror=_mirror(config, model),
        split=tuple((config.model_ids[name], weight) for name, weight in (model.split or {}).items()),
    )


def _mirror(config: Config, model: conf.Model) -> snapshot.Mirror | None:
    """Return the mirror of one worker, with its share of the copies in flight."""
    if (mirror := model.mirror) is None:
        return None
    return snapshot.Mirror(config.model_ids[mirror.to], mirror.share, math.ceil(mirror.max_inflight / config.server.workers))


def _with_common_facts(split: snapshot.Model, models: Iterable[snapshot.Model]) -> snapshot.Model:
    """Return a split with the facts for the model list on which all of its models agree. Its own settings take precedence."""
    ids = {identity for identity, _ in split.split}
    targets = [model for model in models if model.id in ids]
    tasks = {model.task for model in targets}
    return replace(
        split,
        task=split.task or (tasks.pop() if len(tasks) == 1 else None),
        capabilities=_common(model.capabilities for model in targets) if split.capabilities is None else split.capabilities,
        launched_with=_common(model.launched_with for model in targets),
    )


def _common(lists: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Return the capabilities that are in every list; None if a list is not known."""
    known = list(lists)
    if any(each is None for each in known):
        return None
    return tuple(name for name in known[0] or () if all(name in (each or ()) for each in known))


def _price(price: conf.Price) -> Price:
    """Return the prices of all kinds of tokens."""
    cached = price.prompt if price.cached is None else price.cached
    return Price(price.prompt, price.completion, cached, price.completion if price.reasoning is None else price.reasoning)


def _with_adapters(model: conf.Model, base: snapshot.Model) -> Iterator[snapshot.Model]:
    """Yield a model and its LoRA adapters, which clients request like models and the same servers serve."""
    yield base
    for lora in model.loras:
        yield replace(base, id=lora.id, aliases=lora.aliases, mounts=(), mirror=None, parent=model.id, served=lora.id)


def _issuer(issuer: conf.Jwt, key_sets: Mapping[str, bytes]) -> snapshot.Issuer:
    return _made(
        snapshot.Issuer,
        issuer,
        name=issuer.issuer,
        audiences=issuer.audience,
        key_set=issuer.jwks.keys if issuer.jwks.url is None else key_sets.get(issuer.issuer),
        claims=_made(snapshot.Claims, issuer.claims),
        limit=issuer.token_limit,
    )


def _teams(config: Config) -> dict[str, tuple[snapshot.Allowance, ...]]:
    return {team.id: tuple(_allowances(f"team {team.id}", team.limits)) for team in config.teams}


def _keys(config: Config) -> tuple[snapshot.Key, ...]:
    teams = _teams(config)
    return tuple(_key(key, config.isolate_prefix_cache, teams.get(key.team or "", ())) for key in config.keys)


def stored_key(key: conf.Key, config: Config, team: conf.Team | None) -> snapshot.Key:
    """Return a key of the store as workers know it."""
    if team is None:
        return _key(key, config.isolate_prefix_cache, ())
    return replace(_key(key, config.isolate_prefix_cache, tuple(_allowances(f"team {team.id}", team.limits))), team_weight=team.weight)


def _allowances(holder: str, limits: conf.Limits | None) -> Iterator[snapshot.Allowance]:
    """Yield the limits of a key or team. No ID contains a space, so the names of holders are unique."""
    if limits is None:
        return
    amounts = _amounts(limits)
    if amounts != snapshot.Limits():
        yield snapshot.Allowance(holder, amounts)
    if (users := limits.per_user) is not None:
        yield snapshot.Allowance(each_user(holder), _amounts(users), users=_made(snapshot.PerUser, users))
    for row in limits.models:
        yield snapshot.Allowance(f"{holder} for {' '.join(sorted(row.models))}", _amounts(row), row.models)


def _amounts(limits: conf.Limits | conf.ModelLimits | conf.PerUser) -> snapshot.Limits:
    session = limits.session if isinstance(limits, conf.Limits) else None
    return _made(
        snapshot.Limits,
        limits,
        budgets=tuple(_made(snapshot.Budget, each, seconds=window_seconds(each.window)) for each in limits.budgets),
        session=None if session is None else _made(snapshot.Budget, session, window="session"),
    )


def _limits_store(config: Config) -> snapshot.LimitsStore | None:
    if config.limits_store is None:
        return None
    return limits_store(config.limits_store.get_secret_value(), refuses=config.limits.on_store_failure == "refuse")


def _key(key: conf.Key, isolation: conf.PrefixCacheIsolation | None, of_team: tuple[snapshot.Allowance, ...]) -> snapshot.Key:
    return snapshot.Key(
        id=key.id,
        digests=tuple(_digest(one.text) for one in key.hashes),
        digest_expiries={_digest(one.text): one.expires.timestamp() for one in key.hashes if one.expires is not None},
        models=None if key.models == ("*",) else key.models,
        expires=key.expires.timestamp() if key.expires is not None else None,
        fields=_fields(key, isolation),
        weight=snapshot.weight_of(key.priority),
        queue_class=key.queue_class,
        allowances=(*_allowances(f"key {key.id}", key.limits), *of_team),
        user_header=None if key.user_header is None else key.user_header.encode(),
        **{name: getattr(key, name) for name in PROPERTIES},
    )


def _digest(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("sha256:"))


def _fields(key: conf.Key, isolation: conf.PrefixCacheIsolation | None) -> dict[str, Any]:
    """Return the fields to set on each request of a key.

    The salt is the same in all workers and after a restart, and does not reveal the secret.
    """
    fields: dict[str, Any] = {} if key.priority is None else {"priority": key.priority}
    if isolation is not None:
        fields["cache_salt"] = hmac.new(isolation.secret.get_secret_value().encode(), key.id.encode(), hashlib.sha256).hexdigest()
    return fields
