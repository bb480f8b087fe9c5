"""The snapshot that a worker serves from: one immutable value, made by control from the configuration and the known servers.

A ``Snapshot`` crosses a process boundary (see ``link``), so it holds plain values only. The rule: a request uses one ``Snapshot`` from its
start to its end, a worker swaps to the next by one assignment, and a ``Snapshot`` is never modified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from gateway.snapshot.key_properties import KeyProperties
from gateway.snapshot.money import Price
from gateway.system.logs import LogSettings
from gateway.system.tls import Tls
from upstream.balancing import policies
from upstream.balancing.server import ServerSpec
from upstream.http.deadlines import Timeouts

_MAX_PRIORITY = 10  # a larger distance from 0 counts as this: a thousand times the share of others is as good as all of it


def weight_of(priority: int | None) -> float:
    """Return the weight of a key's requests in queues by its priority: each step down doubles it, each step up halves it."""
    return 2.0 ** -max(-_MAX_PRIORITY, min(priority or 0, _MAX_PRIORITY))


DEFAULT_CLASS = "default"
"""The class in queues of a key that names none. It is after all configured classes, unless it is configured too."""
AUTO = "auto"
"""The value of a setting that follows measurements."""
CALENDAR = ("day", "week", "month")
"""The windows of budgets that start with a period of UTC."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of tokens, of cost, or of both. ``soft``: it only warns.

    ``window`` is ``day``, ``week`` or ``month`` of UTC, or the name of a rolling window of ``seconds``, such as ``7d``.
    """

    window: str
    seconds: float = 0.0
    tokens: int | None = None
    cost: int | None = None
    soft: bool = False


@dataclass(frozen=True, slots=True)
class Raised:
    """A limit that is raised for a time: its name, its configured amount, and the end in seconds since the epoch."""

    limit: str
    configured: int
    until: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a holder. None: unlimited. Costs are in whole nano-units. ``max_tokens`` limits one request."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_week: int | None = None
    tokens_per_month: int | None = None
    cost_per_day: int | None = None
    cost_per_week: int | None = None
    cost_per_month: int | None = None
    concurrent: int | None = None
    max_tokens: int | None = None
    budgets: tuple[Budget, ...] = ()
    session: Budget | None = None
    """The budget of each session of the holder."""
    raised: tuple[Raised, ...] = ()
    """The limits whose amounts above are raised at the moment."""

    request_seconds: float = field(init=False)
    """Seconds in which the per-minute limit refills one request. 0: no such limit."""
    token_seconds: float = field(init=False)
    """Seconds in which the per-minute limit refills one token. 0: no such limit."""
    at_once: float = field(init=False)
    """``concurrent`` as a number, infinity for no limit."""

    def __post_init__(self) -> None:
        for name, value in {
            "request_seconds": 60 / self.requests_per_minute if self.requests_per_minute else 0.0,
            "token_seconds": 60 / self.tokens_per_minute if self.tokens_per_minute else 0.0,
            "at_once": math.inf if self.concurrent is None else self.concurrent,
        }.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class PerUser:
    """How limits count each end user.

    ``missing`` is what a request without an end user gets: ``shared`` (one count for all of them), ``refused`` or ``unlimited``.
    ``max_users`` is how many end users have their own counts.
    """

    missing: str = "shared"
    max_users: int = 10_000


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits and the name of their holder. Keys with the same ``holder`` share them. ``models`` are globs, None for all models.

    ``users``: the limits are those of each end user, and nothing counts for ``holder`` itself (see ``limits/end_users``).
    """

    holder: str
    limits: Limits
    models: tuple[str, ...] | None = None
    users: PerUser | None = None


@dataclass(frozen=True, slots=True)
class Key(KeyProperties):
    """A principal.

    ``digests`` are the SHA-256 of its keys. ``digest_expiries`` gives the expiry of single keys by digest, and ``expires`` the expiry of
    the entry, in seconds since the epoch. ``models`` are globs over model IDs, None for all. ``fields`` are set on the body of each
    request. ``weight`` is its share in queues, within its team and its ``queue_class``, and ``team_weight`` that of a team of the store.
    ``allowances`` are its own limits and its team's.
    ``user_header`` is the name, in lowercase, of the header that names the end user.

    The subject of a token is a separate principal. ``entry`` is then the ID of the configured key that it counts as, under which metrics
    show it. ``within`` are globs that narrow its models further, None for no narrowing.
    """

    id: str
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    models: tuple[str, ...] | None = None
    expires: float | None = None
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    digest_expiries: Mapping[bytes, float] = field(default_factory=dict, repr=False)
    weight: float = 1.0
    allowances: tuple[Allowance, ...] = ()
    entry: str | None = None
    within: tuple[str, ...] | None = None
    user_header: bytes | None = None
    queue_class: str | None = None
    team_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Claims:
    """The names of the claims to read. None: not read."""

    subject: str = "sub"
    key: str | None = None
    team: str | None = None
    models: str | None = None
    priority: str | None = None


@dataclass(frozen=True, slots=True)
class Issuer:
    """An issuer whose tokens are accepted as keys.

    ``key_set`` is its JWKS, a JSON list of JWKs (RFC 7517), None until it is known. ``keys`` are the IDs of the keys as which its tokens
    may count. ``leeway`` is in seconds. ``limit`` is the maximum size of a token in bytes. ``subjects`` is how many subjects each worker
    counts separately.
    """

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
    """How many requests may wait in one worker for a model that is down or at capacity, and how many seconds each may wait.

    Shares are measured in service: the weights of an uncached token of a prompt, and of a token of an output. ``deficit``: the service by
    which a flow of weight 1 may be deferred, so that servers find more prompts cached.
    """

    size: int
    wait: float
    prompt_weight: float = 1.0
    completion_weight: float = 4.0
    deficit: float = 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds: from the arrival of a request to its first token, and between two tokens. None: no objective."""

    ttft: float | None = None
    itl: float | None = None

    def with_defaults(self, other: Slo) -> Slo:
        """Return these objectives, completed by those of another section."""
        return Slo(other.ttft if self.ttft is None else self.ttft, other.itl if self.itl is None else self.itl)


@dataclass(frozen=True, slots=True)
class QueueClass:
    """A class of keys in queues. ``strict``: it is served before the classes after it.

    ``aging``: seconds after which a waiting request lets its class compete with the strict ones; None: never. ``slo`` takes precedence
    over the model's, value by value. ``reserved_slots``: slots of each server that requests of the classes after it never use; ``auto``:
    as many as the objectives need. ``preempts``: its requests may stop those of later classes that have sent nothing to their clients.
    """

    name: str
    weight: float = 1.0
    strict: bool = False
    aging: float | None = None
    slo: Slo = Slo()
    reserved_slots: int | str | None = None
    preempts: bool = False


@dataclass(frozen=True, slots=True)
class Mirror:
    """The ID of the model that gets copies of requests, their share up to 1, and how many may be in flight in one worker."""

    to: str
    share: float
    max_inflight: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Which requests are recorded, and where.

    ``keys`` are patterns of IDs, and ``models`` of IDs and aliases. ``share`` is above 0 and up to 1. ``store`` is the path of a folder, or
    the URL of a bucket if there are ``credentials``: the ID and the secret of an access key. ``retention`` is in seconds. ``redact`` names
    the fields whose values are not recorded. The first of the ``encryption_keys`` encrypts; without keys, records are not encrypted.
    """

    store: str
    keys: tuple[str, ...] = ("*",)
    models: tuple[str, ...] = ("*",)
    share: float = 0.01
    retention: float = 7 * 86400.0
    redact: tuple[str, ...] = ()
    encryption_keys: tuple[bytes, ...] = field(default=(), repr=False)
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    region: str = "us-east-1"


class Resume(StrEnum):
    """Which streams are continued on another server: exact ones only, also sampled ones, or none."""

    EXACT = "exact"
    SAMPLED = "sampled"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class BodyRules:
    """A model's settings for request bodies, in addition to the general rules (see ``policy``)."""

    allow: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    max_n: int | None = None
    max_tokens: int | None = None
    media_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitsStore:
    """A Redis in which several gateways count together: at the socket ``path``, or at the first of ``hosts`` that accepts writes.

    ``primary``: the name by which the hosts, which are Sentinels then, know the primary.
    ``refuses``: requests are refused while it is unreachable, instead of being counted by each gateway alone. ``timeout`` is the timeout
    of a reply in seconds. It is checked four times a second, so a reply may take up to twice as long.
    """

    hosts: tuple[tuple[str, int], ...] = (("localhost", 6379),)
    primary: str | None = None
    path: str | None = None
    tls: bool = False
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    refuses: bool = False
    timeout: float = 0.25

    def __str__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return self.path or (f"{hosts}/{self.primary}" if self.primary else hosts)

    @property
    def counts(self) -> tuple[str, int]:
        """The identity of the counts, independent of credentials and TLS."""
        return str(self), self.database


@dataclass(frozen=True, slots=True)
class Model:
    """A model as clients see it, and its servers.

    ``mounts`` are path prefixes that serve this model alone. A launched server that is stopped is not in ``servers``. ``max_inflight``
    limits the requests of all workers together on each server. ``keepalive`` is in seconds. ``price`` None: its tokens cost nothing.

    ``fallbacks`` are the names of the models to try in order when no server of this one can take a request. ``rewrite``: responses carry
    this model's ID whatever name its servers use. ``mirror``: copies of requests for another model; None for an adapter.

    ``task`` and ``capabilities`` are the configured values for the model list. ``launched_with`` are the capabilities that the launch
    arguments give a model that generates text. None: unknown.

    A LoRA adapter is a model too. ``parent`` is then the ID of its base model, whose servers it shares, and ``served`` the name under
    which they know it.

    A split is a model too. It has no servers: ``split`` are the IDs of the models that serve its requests, with their weights. ``sticky``
    is ``key`` or ``session`` if all requests of one go to the same model.
    """

    id: str
    servers: tuple[ServerSpec, ...]
    aliases: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    balance: str = policies.DEFAULT
    policy: Mapping[str, Any] = field(default_factory=dict)
    """The settings of this balance policy by name. A missing setting has its default."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    queue: Queue | None = None
    max_inflight: int | None = None
    has_auto_max_inflight: bool = False
    """``max_inflight`` is the first limit. Control then sends another one for each server, which follows the server's load."""
    slo: Slo = Slo()
    keepalive: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    body: BodyRules = field(default_factory=BodyRules)
    fallbacks: tuple[str, ...] = ()
    rewrite: bool = False
    running_usage: bool = True
    """Streams whose tokens are counted request the server's running usage."""
    resume: Resume = Resume.EXACT
    move_after: float = 5.0
    """Seconds in which streams may finish on a server that is drained, before they are continued on another one."""
    created: int = 0
    parent: str | None = None
    served: str | None = None
    price: Price | None = None
    task: str | None = None
    capabilities: tuple[str, ...] | None = None
    launched_with: tuple[str, ...] | None = None
    mirror: Mirror | None = None
    split: tuple[tuple[str, int], ...] = ()
    sticky: str | None = None

    @property
    def has_own_servers(self) -> bool:
        """Whether it is neither a LoRA adapter nor a split."""
        return self.parent is None and not self.split

    @property
    def base(self) -> str:
        """The ID of the model that owns the servers: the model itself or its parent."""
        return self.parent or self.id

    def is_in(self, globs: Iterable[str]) -> bool:
        """Return whether a glob matches its ID or an alias. ``*`` matches any text, including slashes."""
        return any(fnmatchcase(name, glob) for name in (self.id, *self.aliases) for glob in globs)


@dataclass(frozen=True, slots=True)
class Tracing:
    """The base URL to which spans are sent, and the share of requests that are traced, above 0 and up to 1."""

    endpoint: str
    sample: float = 1.0


@dataclass(frozen=True, slots=True)
class Clients:
    """The limits of client connections in one worker.

    Timeouts are in seconds. ``body_memory`` is in bytes, for all bodies in this worker together. ``trusted_proxies`` are networks.
    ``max_per_address`` is a number of connections.
    """

    headers_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    body_memory: int = 256 * 1024 * 1024
    max_per_address: int | None = None
    trusted_proxies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionRules:
    """The rules by which a port checks the sessions of people. The IDs of revoked ones come in a separate message.

    ``key`` signs cookies. ``secure``: browsers use TLS. ``idle`` and ``lifetime`` are in seconds. ``issuers`` are the trusted issuers; an
    empty text means sign-in links.
    """

    key: bytes = field(repr=False)
    secure: bool
    idle: float
    lifetime: float
    issuers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of the data that workers serve.

    ``body_limit`` is in bytes. ``max_inflight`` is for all ``workers`` together. ``docs``: the API reference is served. ``log_sample`` is
    the share of requests whose body shape is logged.
    """

    version: int
    keys: tuple[Key, ...]
    models: tuple[Model, ...]
    body_limit: int = 20 * 1024 * 1024
    body_values: int = 500_000
    cors_origins: tuple[str, ...] = ()
    docs: bool = False
    portal: bool = False
    log_user: bool = False
    log_sample: float = 0.0
    ledger_user: bool = False
    ledger_metadata: bool = False
    bill_cancelled_prefill: bool = False
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
    team_weights: Mapping[str, float] = field(default_factory=dict)
    """The shares of teams in queues; 1 for a team that is not in it."""
    classes: tuple[QueueClass, ...] = ()
    """The classes in queues, in order."""
    default_model: str | None = None
    """The ID or alias of the model for requests without a model."""
    warn_at: float = 0.8
    """Responses have a warning once this share of a budget is used."""
    has_store: bool = False
    """Whether there may be keys in addition to these: those of the store (see ``link``)."""
    recording: Recording | None = None
    """Which requests are recorded with their bodies. None: none."""
    sessions: SessionRules | None = None
    """The rules for the sessions of people on the data port. None: people do not sign in there."""

    @property
    def bases(self) -> tuple[Model, ...]:
        """The models that own servers: all but the LoRA adapters and the splits."""
        return tuple(model for model in self.models if model.has_own_servers)

    @property
    def uses_store(self) -> bool:
        """Whether a limits store is configured, and any key or team has limits to count in it."""
        return self.limits_store is not None and (self.has_store or any(key.allowances for key in self.keys) or any(self.teams.values()))
