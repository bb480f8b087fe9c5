"""What a worker serves by: one immutable value, made by control from the configuration.

``Snapshot`` crosses a process boundary (see ``link``), so it holds plain values only. The rule: a worker reads one
``Snapshot`` for the whole of a request and swaps to the next by one reference; nobody changes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from gateway.system.logs import LogSettings
from gateway.system.tls import Tls
from upstream.balancing import policies
from upstream.balancing.server import ServerSpec
from upstream.http.deadlines import Timeouts


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be used; None: any amount. Costs are in the currency of the prices; ``max_tokens`` is of one request."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    cost_per_day: float | None = None
    cost_per_month: float | None = None
    concurrent: int | None = None
    max_tokens: int | None = None

    request_seconds: float = field(init=False)
    """Those in which a minute's limit gives one request; 0 where there is none."""
    token_seconds: float = field(init=False)
    at_once: float = field(init=False)
    """``concurrent`` as a number; infinity where there is none."""
    calendar: bool = field(init=False)
    """Whether one of them is for a day or a month."""
    quotas: tuple[float, float, float, float] = field(init=False)
    """Of a day's tokens and cost and of a month's; infinity where there is none."""
    in_advance: tuple[float, float, float, float] = field(init=False)
    """The most that is taken of each of these before it is used; 0 where there is none."""

    def __post_init__(self) -> None:
        quotas = (self.tokens_per_day, self.cost_per_day, self.tokens_per_month, self.cost_per_month)
        for name, value in {
            "request_seconds": 60 / self.requests_per_minute if self.requests_per_minute else 0.0,
            "token_seconds": 60 / self.tokens_per_minute if self.tokens_per_minute else 0.0,
            "at_once": math.inf if self.concurrent is None else self.concurrent,
            "calendar": any(quota is not None for quota in quotas),
            "quotas": tuple(math.inf if quota is None else quota for quota in quotas),
            "in_advance": tuple(quota or 0.0 for quota in quotas),
        }.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits, and who shares them: whatever has the same ``holder`` counts as one. ``models`` are globs, None for all."""

    holder: str
    limits: Limits
    models: tuple[str, ...] | None = None


_MOST = 10
"""Priorities further from 0 than this count as this: a thousand times the others' share is as good as all of it."""


def weight_of(priority: int | None) -> float:
    """The weight of a key's requests by its priority: each step down doubles it, each step up halves it."""
    return 2.0 ** -max(-_MOST, min(priority or 0, _MOST))


@dataclass(frozen=True, slots=True)
class Key:
    """A principal. ``digests`` are the SHA-256 of its keys; ``models`` are globs over model IDs, None for all; ``expires`` is in
    seconds since the epoch, and ``ends`` has that of single keys, by their digest; those of a ``revoked`` one are refused. ``fields``
    are set on the body of each of its requests; ``team`` and ``labels`` go into its rows of the ledger; ``weight`` is its share
    where requests of several keys wait; ``allowances`` are its own limits and its team's.

    A token's subject is a principal of its own: ``entry`` is then the id of the configured one that it counts as, under which metrics
    show it, and ``within`` are globs that narrow its scope further, None for no further."""

    id: str
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    models: tuple[str, ...] | None = None
    expires: float | None = None
    anonymous: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    team: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    ends: Mapping[bytes, float] = field(default_factory=dict, repr=False)
    revoked: bool = False
    weight: float = 1.0
    allowances: tuple[Allowance, ...] = ()
    entry: str | None = None
    within: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """Which of a token's claims say what; None: none does."""

    subject: str = "sub"
    key: str | None = None
    team: str | None = None
    models: str | None = None
    priority: str | None = None


@dataclass(frozen=True, slots=True)
class Issuer:
    """Whose tokens are taken as keys. ``key_set`` holds its public keys, a JSON list of JWKs (RFC 7517), None while they are not
    known; ``keys`` are the ids of the principals as which its tokens may count; ``leeway`` is in seconds, ``limit`` in bytes of a token;
    ``subjects`` is for how many of them each worker counts apart."""

    name: str
    audiences: tuple[str, ...]
    keys: tuple[str, ...]
    algorithms: tuple[str, ...]
    key_set: bytes | None = None
    claims: Claims = field(default_factory=Claims)
    leeway: float = 30.0
    limit: int = 8192
    subjects: int = 10_000


@dataclass(frozen=True, slots=True)
class Queue:
    """How many requests may wait in one worker for a model that is not up, or whose servers are full, and for how many seconds each."""

    size: int
    wait: float


@dataclass(frozen=True, slots=True)
class BodyRules:
    """What an operator says about a model's request bodies, beside the usual rules (see ``policy``)."""

    allow: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    max_n: int | None = None
    max_tokens: int | None = None
    media_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitsStore:
    """A Redis where several gateways count together, at a host and port or at a socket's ``path``.

    ``refuses``: while it is away requests are refused, and not counted by each gateway for itself. ``patience``: seconds that a reply
    may take; it is looked at four times a second, so up to twice as long.
    """

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    tls: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    refuses: bool = False
    patience: float = 0.25

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    @property
    def counts(self) -> tuple[str, int]:
        """Which counts are meant, however one gets there."""
        return str(self), self.database


@dataclass(frozen=True, slots=True)
class Model:
    """A model as clients see it, and its servers. ``mounts`` are path prefixes that serve this model alone; a launched server
    that is stopped is not among ``servers``; ``max_inflight`` is what all workers together may have in flight on each server;
    ``keepalive`` is in seconds; ``price`` is per million prompt and completion tokens.

    ``fallbacks`` are the names of the models to try, in order, when none of its servers can take a request; ``rewrite``: its
    answers are to carry its id, whatever its servers call it.

    ``task`` and ``capabilities`` are what the model list shows, as configured; ``launched_with`` the capabilities that its launch
    arguments give it if it generates text. None: not known.

    A LoRA adapter is a model too: ``parent`` is then the id of its base, whose servers it shares, and ``served`` the
    name under which all of them know it.
    """

    id: str
    servers: tuple[ServerSpec, ...]
    aliases: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    balance: str = policies.DEFAULT
    timeouts: Timeouts = field(default_factory=Timeouts)
    queue: Queue | None = None
    max_inflight: int | None = None
    keepalive: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    body: BodyRules = field(default_factory=BodyRules)
    fallbacks: tuple[str, ...] = ()
    rewrite: bool = False
    owned_by: str = "vllm-gateway"
    created: int = 0
    parent: str | None = None
    served: str | None = None
    price: tuple[float, float] | None = None
    task: str | None = None
    capabilities: tuple[str, ...] | None = None
    launched_with: tuple[str, ...] | None = None

    @property
    def base(self) -> str:
        """The id of the model whose servers these are: its own, or its parent's."""
        return self.parent or self.id

    def is_in(self, globs: Iterable[str]) -> bool:
        """Whether one of these covers its id or an alias; in them ``*`` stands for anything, slashes too."""
        return any(fnmatchcase(name, glob) for name in (self.id, *self.aliases) for glob in globs)


@dataclass(frozen=True, slots=True)
class Tracing:
    """Where spans go, a base URL, and which share of the requests, above 0 and up to 1, has one."""

    endpoint: str
    sample: float = 1.0


@dataclass(frozen=True, slots=True)
class Clients:
    """What a worker asks of its clients' connections. Timeouts are in seconds; ``body_memory`` is in bytes, those of all bodies
    that this worker holds at once; ``trusted_proxies`` are networks, ``max_per_address`` connections."""

    headers_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    body_memory: int = 256 * 1024 * 1024
    max_per_address: int | None = None
    trusted_proxies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of what the workers serve. ``body_limit`` is in bytes; ``max_inflight`` is for all ``workers`` together;
    ``docs``: the API reference is served; ``log_sample`` is the share of requests
    whose body's shape is logged."""

    version: int
    keys: tuple[Key, ...]
    models: tuple[Model, ...]
    body_limit: int = 20 * 1024 * 1024
    body_values: int = 500_000
    cors_origins: tuple[str, ...] = ()
    docs: bool = False
    log_user: bool = False
    log_sample: float = 0.0
    ledger_user: bool = False
    ledger_metadata: bool = False
    max_inflight: int | None = None
    workers: int = 1
    log: LogSettings = field(default_factory=LogSettings)
    tracing: Tracing | None = None
    clients: Clients = field(default_factory=Clients)
    tls: Tls | None = None
    limits_store: LimitsStore | None = None
    issuers: tuple[Issuer, ...] = ()
    teams: Mapping[str, tuple[Allowance, ...]] = field(default_factory=dict)
    """The limits of each team that a token may name."""
    default_model: str | None = None
    """The ID or alias of the model for requests that name none."""

    @property
    def bases(self) -> tuple[Model, ...]:
        """The models that have servers of their own: all but the LoRA adapters."""
        return tuple(model for model in self.models if model.parent is None)

    @property
    def uses_store(self) -> bool:
        """Whether a limits' store is configured, and any key or team has limits to count there."""
        return self.limits_store is not None and (any(key.allowances for key in self.keys) or any(self.teams.values()))
