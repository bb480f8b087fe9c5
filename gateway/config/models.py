"""The configuration as values: every section, setting, default and bound, each declared once.

The YAML, the error messages and the JSON Schema all come from these classes. The rule: a class validates each setting by itself.
``references`` validates relations between settings. It works on the raw document, and so also sees the parts that are invalid here.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, fields
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)

from gateway.config.quantities import Duration, DurationOrZero, Share, Size, Window, duration_text, parse_duration, parse_size
from gateway.config.secret import (
    OF_LEDGER,
    KeyStore,
    LedgerStore,
    LimitsStore,
    LongSecret,
    Secret,
    SessionKey,
    Webhook,
    key_store,
    ledger_store,
    surroundings,
)
from gateway.config.section import Section, declared, section_of, setting
from gateway.config.values import (
    AdminRole,
    Balance,
    BodyFields,
    BrowserUrl,
    Count,
    CountOrAuto,
    FilePath,
    Flag,
    Hashes,
    HeaderName,
    HttpUrl,
    Instant,
    IssuerId,
    KeySet,
    ListenHost,
    LogPart,
    MailAddress,
    MailAddresses,
    MediaHost,
    Mount,
    Name,
    NamedPort,
    Network,
    Options,
    Origin,
    Port,
    Preset,
    ReadableFile,
    ServerUrl,
    Text,
    Texts,
    TokenHash,
    TraceUrl,
    Variables,
    WeightsSource,
    Workers,
    WrittenFile,
    exists,
    installed,
    money,
    needs_extra,
    one_text_or_many,
    record_key,
    requires,
)
from gateway.snapshot.key_properties import KeyProperties
from gateway.snapshot.money import MAX_COST_LIMIT, MAX_PRICE
from gateway.system.logs import PARTS
from gateway.system.tls import CertificateError, Pair
from gateway.system.tls import Tls as Files
from upstream.balancing import policies
from upstream.http.address import Address
from upstream.vllm import path_options
from upstream.vllm.command_line import takes_vllms_flags
from upstream.vllm.installed_vllm import runs_vllm_itself

_BUCKET_SCHEMES = ("https://", "http://")
_BUCKET_PATH = re.compile(r"/[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.+(/|$))[A-Za-z0-9._-]+)*/?")


def quantity(description: str, text: str) -> Any:
    """Return a setting for a size or duration. ``text`` is its default, as written in YAML."""
    parse = parse_size if text.endswith("B") else parse_duration
    return setting(description, parse(text), json_schema_extra={"default": text})


class Cors(Section):
    """Origins from which browsers may call the gateway. None by default."""

    origins: tuple[Origin, ...] = setting("origins such as https://app.example.com, or *", ())


class Tls(Section):
    """TLS on a port. The files are watched, and a renewed certificate is used within seconds."""

    cert: ReadableFile = Field(description="file with the certificate chain, PEM")
    key: ReadableFile = Field(description="file with the private key, PEM")

    @property
    def files(self) -> Files:
        return Files(str(self.cert), str(self.key))

    @model_validator(mode="after")
    def _belong_together(self) -> Tls:
        try:
            Pair.read(self.files).check()
        except CertificateError as error:
            raise ValueError(f"cert and key are unusable: {error}") from None
        return self


class AdminToken(Section):
    """A bearer token for the admin port. The configuration has only its hash."""

    name: Name = Field(description="name of the token in logs and in the audit log")
    hash: TokenHash = Field(description="hash of the token, as `vllm-gateway keys hash` prints it")
    role: AdminRole = Field(description="role of its clients")
    expires: Instant | None = setting("time from which it is refused; a date means 00:00 UTC")


class Admin(Section):
    """The admin port for operators and Prometheus: /metrics, /livez, /readyz, /status."""

    host: ListenHost = setting("address of the admin port; `::` is all addresses, IPv6 and IPv4", "127.0.0.1")
    port: Port = setting("admin port; 0 selects a free port", 9090)
    token: Secret | None = setting("bearer token that the admin port requires; its clients are admins")
    tokens: tuple[AdminToken, ...] = setting("further bearer tokens, each with a role", ())
    tls: Tls | None = setting("TLS on the admin port")


class ServerSection(Section):
    """The gateway's ports and limits."""

    host: ListenHost = setting("address of the data port; `::` is all addresses, IPv6 and IPv4", "0.0.0.0")  # noqa: S104  clients are on other machines
    port: Port = setting("data port; 0 selects a free port", 8000)
    workers: Workers = setting("worker processes on the data port; `auto`: one for each usable CPU", 1)
    admin: Admin = setting("the admin port", Admin())
    tls: Tls | None = setting("TLS on the data port")
    cors: Cors = setting("origins from which browsers may call the gateway", Cors())
    docs: Flag = setting("serve the API reference on the data port without a key: /docs and /openapi.json", False)
    portal: Flag = setting("serve the portal on the data port: pages on which people with a key use models", False)
    trusted_proxies: tuple[Network, ...] = setting("networks of the proxies whose X-Forwarded-For is trusted", ())
    max_connections_per_address: Count | None = setting(
        "maximum connections of one client address to each worker; connections of trusted proxies do not count"
    )
    body_limit: Size = quantity("maximum size of a request body", "20MiB")
    body_values: Annotated[int, Strict(), Field(ge=2048)] = setting(
        "maximum number of JSON values in a request body, counted by commas, colons and opening brackets", 500_000
    )
    body_memory: Size = quantity(
        "maximum size of all request bodies in memory, for all workers together; further requests are rejected", "256MiB"
    )
    headers_timeout: Duration = quantity("time in which a client must send the headers of a request", "10s")
    body_timeout: Duration = quantity("time for which a client may send its body slower than 1 KiB/s", "60s")
    write_timeout: Duration = quantity("time for which a client may not read its response", "60s")
    max_inflight: Count | None = setting(
        "maximum concurrent requests of the whole gateway, including queued ones; further requests are rejected"
    )
    linger: DurationOrZero = quantity("time between the stop signal and the drain, in which /readyz fails and requests are served", "0s")
    drain: DurationOrZero = quantity("time in which open requests may finish when the gateway stops", "30s")


MAX_REPLICAS = 1024


class Launch(Section):
    """A model whose servers the gateway launches."""

    command: Annotated[tuple[Text, ...], Field(min_length=1)] = setting("command that starts a server", ("vllm", "serve"))
    model: WeightsSource | None = setting("model that the server loads: a name on the hub or a folder; default: the model's ID")
    preset: Preset | None = setting("model family; sets the parsers for tool calls and reasoning that `args` does not set")
    replicas: Annotated[int, Strict(), Field(ge=1, le=MAX_REPLICAS)] = setting("number of servers", 1)
    gpus: tuple[tuple[Annotated[int, Strict(), Field(ge=0)], ...], ...] | None = setting(
        "GPU numbers of each replica, e.g. [[0, 1], [2, 3]]"
    )
    args: Options = setting(
        "options of the command without dashes; true and false for flags, a list for a repeated option, a mapping for JSON", {}
    )
    env: Variables = setting("environment variables of the server; secrets as {env: NAME} or {file: PATH}", {})
    start: Literal["eager", "on_demand"] = setting("when the servers start: with the gateway, or on the first request", "eager")
    idle_stop: Duration | None = setting("stop the servers after this time without requests")
    idle_sleep: Duration | None = setting("put the servers to sleep after this time without requests")
    sleep_level: Literal[1, 2] = setting("sleep level: 1 moves the weights to main memory, 2 loads them again on wake-up", 1)
    group: Name | None = setting("group that limits how many of its models run at the same time; see `groups`")
    startup_timeout: Duration = quantity("time in which a server must become healthy after its start", "20m")

    @property
    def all_gpus(self) -> frozenset[int]:
        """The GPUs of all replicas."""
        return frozenset(gpu for replica in self.gpus or () for gpu in replica)

    @field_validator("command")
    @classmethod
    def _programs_of_the_folder(cls, command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return path_options.absolute_command(command, surroundings(info).folder, exists)

    @field_validator("args")
    @classmethod
    def _files_of_the_folder(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Resolve relative paths from the configuration's folder. A missing file is watched, so that a later one is noticed."""
        command = info.data.get("command", ())
        if not takes_vllms_flags(command):
            return args
        around = surroundings(info)
        found = path_options.absolute(args, around.folder, exists, own=runs_vllm_itself(command))
        for named in path_options.paths(found):
            if path_options.has_to_exist(named) and not exists(around.folder / named.path):
                around.file(named.path)
        return found


class Server(Section):
    """A server that the gateway does not launch."""

    url: ServerUrl = Field(description="address: http://host:port, https://… or unix:/path/to.sock")
    model: Name | None = setting("name under which it serves the model; default: the model's ID")
    api_key: Secret | None = setting("API key that it requires")
    weight: Annotated[int, Strict(), Field(ge=1, le=1000)] = setting("share of the requests relative to the other servers", 1)

    @property
    def address(self) -> Address:
        return Address.parse(self.url)


class Kubernetes(Section):
    """The servers of a Kubernetes service, from its EndpointSlices."""

    service: Name = Field(description="name of the service")
    namespace: Name | None = setting("namespace of the service; default: the gateway's own")
    port: NamedPort | None = setting("number or name of the port; default: the service's only port")


class Dns(Section):
    """The servers behind a DNS name that resolves to all their addresses."""

    name: Name = Field(description="name to resolve")
    port: Annotated[int, Strict(), Field(ge=1, le=65535)] = setting("port of every server", 8000)
    interval: Duration = quantity("time between two lookups", "10s")


class Discover(Section):
    """Servers that are discovered at runtime, with Kubernetes or DNS."""

    kubernetes: Kubernetes | None = setting("a Kubernetes service")
    dns: Dns | None = setting("a DNS name")
    model: Name | None = setting("name under which they serve the model; default: the model's ID")
    api_key: Secret | None = setting("API key that they require")


class Timeouts(Section):
    """The timeouts of a model's servers."""

    connect: Duration = quantity("from the connection attempt to the connection", "2s")
    first_byte: Duration = quantity("from the request to the first byte of the response", "120s")
    idle: Duration = quantity("between two reads of a response", "60s")
    total: Duration = quantity("for the whole request", "1h")


_Deficit = Annotated[float, Strict(), Field(ge=0, le=1e9)]
_Weight = Annotated[float, Strict(), Field(ge=0.001, le=1000)]


class Queue(Section):
    """The queue for requests while no server of the model is up, or all are at `max_inflight`."""

    size: Count = setting("maximum number of queued requests; further requests are rejected", 128)
    wait: Duration = quantity("maximum time in the queue", "30s")
    prompt_weight: _Weight = setting("service of a prompt token that was not cached; shares of the queue are measured in service", 1.0)
    completion_weight: _Weight = setting("service of an output token", 4.0)
    deficit: _Deficit = setting(
        "with `balance: cost`: service, by weight, by which a team or key may be deferred for requests with more cached tokens; 0: never",
        10_000.0,
    )


class Slo(Section):
    """Objectives for the latency of requests. The values of a class take precedence over the model's."""

    ttft: Duration | None = setting("from the arrival of a request to its first token")
    itl: Duration | None = setting("between two tokens of a stream")

    @model_validator(mode="after")
    def _has_an_objective(self) -> Slo:
        if self.ttft is None and self.itl is None:
            raise ValueError("contains no objective: set ttft, itl, or both")
        return self


class QueueClass(Section):
    """A class of keys in the queues of all models. The classes are in order, the most urgent one first."""

    id: Name = Field(description="name of the class")
    weight: _Weight = setting("share of the class among the classes that are not strict", 1.0)
    strict: Flag = setting("serve its requests before those of all classes after it", False)
    aging: Duration | None = setting(
        "time after which a waiting request lets its class compete with the strict ones, by weight; default: never"
    )
    slo: Slo | None = setting("objectives for the latency of its requests")
    reserved_slots: CountOrAuto | None = setting(
        "slots of each server, of its model's `max_inflight`, that requests of the classes after it never use; `auto`: as many as its "
        "objectives need"
    )
    preempts: Flag = setting(
        "if its next request has to wait: stop the latest request of the classes after it that has sent nothing to its client, and queue "
        "it again",
        False,
    )


class _Named(Section):
    id: Name = Field(description="ID that clients send in `model`")
    aliases: tuple[Name, ...] = setting("further names for clients", ())

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may use, the ID first."""
        return (self.id, *self.aliases)


class Lora(_Named):
    """A LoRA adapter of the model, which clients request by its own ID."""

    path: WeightsSource | None = setting("what a launched server loads: a name on the hub or a folder")


class Body(Section):
    """The fields that a request body may contain."""

    allow: tuple[Name, ...] = setting("fields to pass on that are refused, removed or limited by default", ())
    refuse: tuple[Name, ...] = setting("fields to refuse in addition to the default ones", ())
    max_n: Count | None = setting("maximum of n and best_of; default: 128")
    max_tokens: Count | None = setting(
        "maximum of max_tokens, max_completion_tokens and max_output_tokens; also set on requests without any of them"
    )
    media_hosts: tuple[MediaHost, ...] = setting(
        "hosts for image, audio and video URLs, e.g. *.example.com, or * for any; default: data: URLs only", ()
    )


class Mirror(Section):
    """Copies of a share of the model's requests for another model. The responses to the copies are discarded."""

    to: Name = Field(description="model that gets the copies")
    share: Share = Field(description="share of the requests that are copied")
    max_inflight: Count = setting("maximum copies in flight; without capacity, a request is not copied", 16)


_Price = Annotated[int, money(least=0, most=MAX_PRICE)]


class Price(Section):
    """Prices of tokens, in one currency for all models, with up to 9 decimals."""

    prompt: _Price = setting("price of a million prompt tokens", 0)
    completion: _Price = setting("price of a million completion tokens", 0)
    cached: _Price | None = setting("price of a million prompt tokens from the prefix cache; default: as `prompt`")
    reasoning: _Price | None = setting("price of a million reasoning tokens; default: as `completion`")


_POLICIES_WITH_SETTINGS = tuple(name for name, policy in policies.POLICIES.items() if fields(policy.settings))
S = TypeVar("S", bound=Section)
B = TypeVar("B", "Budget", "SessionBudget")


def _with_policy_settings(model: type[S]) -> type[S]:
    """Return the section of a model with a section for each balance policy that has settings."""
    sections: dict[str, Any] = {}
    for name in _POLICIES_WITH_SETTINGS:
        section = section_of(f"{name}_policy", policies.POLICIES[name].settings, f"Settings of the balance policy `{name}`.")
        sections[f"{name}_policy"] = (section | None, setting(f"settings of `balance: {name}`"))
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, __module__=__name__, **sections)


Weight = Annotated[int, Strict(), Field(ge=0, le=1_000_000)]
Task = Literal["chat", "completion", "embedding", "rerank", "classify", "transcription"]
Capability = Literal["tools", "reasoning", "structured_outputs", "image", "audio", "video"]


@_with_policy_settings
class Model(_Named):
    """A model and its servers."""

    mounts: tuple[Mount, ...] = setting("path prefixes that serve only this model, e.g. /team/model", ())
    launch: Launch | None = setting("servers that the gateway launches; {} for the defaults")
    servers: Annotated[tuple[Server, ...], Field(min_length=1)] | None = setting("servers that the gateway does not launch")
    discover: Discover | None = setting("servers that are discovered at runtime")
    split: Annotated[dict[Name, Weight], Field(min_length=1)] | None = setting(
        "models between which the requests for this name are divided, with their weights, e.g. {model-a: 95, model-b: 5}"
    )
    sticky: Literal["key", "session"] | None = setting("with `split`: requests of one key, or of one session, always go to the same model")
    loras: tuple[Lora, ...] = setting("LoRA adapters of the model", ())
    balance: Balance = setting("how a server is selected", policies.DEFAULT)
    timeouts: Timeouts = setting("timeouts of the servers", Timeouts())
    queue: Queue | None = setting(
        "queue for requests that wait for a server; default: {} for `servers`, with `max_inflight`, and for launched models that may stop"
    )
    max_inflight: CountOrAuto | None = setting(
        "maximum concurrent requests on each server; further requests wait in `queue`; `auto`: found from the server's metrics"
    )
    shared_servers: Flag = setting(
        "other gateways use the same servers: a number in `max_inflight` is for all of them together, by the servers' metrics", False
    )
    slo: Slo | None = setting("objectives for the latency of its requests")
    keepalive: Duration | None = setting("interval of SSE comments on an idle stream, so that proxies do not close it")
    defaults: BodyFields = setting("body fields for requests that do not set them", {})
    overrides: BodyFields = setting("body fields that replace the request's", {})
    body: Body = setting("fields that a request body may contain", Body())
    fallbacks: tuple[Name, ...] = setting("models to try in this order when no server of this model can take the request", ())
    mirror: Mirror | None = setting("copies of a share of the requests for another model, for tests of that model")
    rewrite_model: Flag = setting("replace the model name in responses by this ID", False)
    running_usage: Flag = setting(
        "count truncated streams exactly, if a ledger or a limit counts their tokens; false: by their events", True
    )
    resume: Literal["exact", "sampled", False] = setting(
        "continue a stream on another server when its server fails or drains: `exact`, if the response stays the same; `sampled`, also "
        "other responses with `temperature`, whose rest is drawn again; `false`, never",
        "exact",
    )
    move_after: DurationOrZero = quantity(
        "time in which streams may finish on a server that is drained, before they continue on another one (see `resume`)", "5s"
    )
    price: Price | None = setting("prices of its tokens")
    task: Task | None = setting("task in the model list; default: from the launch arguments and the servers")
    capabilities: tuple[Capability, ...] | None = setting("capabilities in the model list; default: from the launch arguments")

    @model_validator(mode="after")
    def _has_settings_of_its_policy(self) -> Model:
        for name in _POLICIES_WITH_SETTINGS:
            if name != self.balance and getattr(self, f"{name}_policy") is not None:
                raise ValueError(f"{name}_policy has no effect without `balance: {name}`")
        return self

    @property
    def policy(self) -> dict[str, Any]:
        """The settings of its balance policy; empty if none is written."""
        settings = getattr(self, f"{self.balance}_policy") if self.balance in _POLICIES_WITH_SETTINGS else None
        return {} if settings is None else asdict(settings)

    @property
    def max_inflight_follows_load(self) -> bool:
        """Whether the limit of each server is found from the server's metrics."""
        return self.max_inflight == "auto" or (self.shared_servers and self.max_inflight is not None)

    @property
    def entries(self) -> tuple[Model | Lora, ...]:
        """The model and its LoRA adapters."""
        return (self, *self.loras)


class Group(Section):
    """Launched models that share a limit: only some of them run at the same time."""

    id: Name = Field(description="name of the group, for `launch.group`")
    max_running: Count = setting("maximum number of models that run at the same time", 1)


_Cost = Annotated[int, money(above=0, most=MAX_COST_LIMIT)]


def _counts_something(budget: B) -> B:
    if budget.tokens is None and budget.cost is None:
        raise ValueError("contains no budget: set tokens, cost, or both")
    return budget


class Budget(Section):
    """A budget of tokens, of cost, or of both in a window of time."""

    window: Window = Field(description="`day`, `week` (from Monday) or `month` of UTC, or the length of a rolling window, e.g. `7d`")
    tokens: Count | None = setting("prompt and completion tokens")
    cost: _Cost | None = setting("cost, by the models' prices")
    soft: Flag = setting("only warn: in a header, a metric and the log; no request is refused", False)

    _check = model_validator(mode="after")(_counts_something)


class SessionBudget(Section):
    """The budget of each session: of all requests with the same `x-session-id` or `metadata.session_id`."""

    tokens: Count | None = setting("prompt and completion tokens of a session")
    cost: _Cost | None = setting("cost of a session, by the models' prices")

    _check = model_validator(mode="after")(_counts_something)


class _Counted(Section):
    requests_per_minute: Count | None = setting("requests per minute")
    tokens_per_minute: Count | None = setting("prompt and completion tokens per minute")
    tokens_per_day: Count | None = setting("prompt and completion tokens per day (UTC)")
    tokens_per_week: Count | None = setting("prompt and completion tokens per week (UTC, from Monday)")
    tokens_per_month: Count | None = setting("prompt and completion tokens per month (UTC)")
    cost_per_day: _Cost | None = setting("cost per day (UTC), by the models' prices")
    cost_per_week: _Cost | None = setting("cost per week (UTC, from Monday), by the models' prices")
    cost_per_month: _Cost | None = setting("cost per month (UTC), by the models' prices")
    concurrent: Count | None = setting("concurrent requests")
    budgets: Annotated[tuple[Budget, ...], Field(max_length=8)] = setting(
        "further budgets: of rolling windows, and soft budgets, which only warn", ()
    )

    @field_validator("budgets")
    @classmethod
    def _differ(cls, budgets: tuple[Budget, ...]) -> tuple[Budget, ...]:
        if len({(each.window, each.soft) for each in budgets}) < len(budgets):
            raise ValueError("two entries have the same window; write tokens and cost into one entry")
        return budgets


class _Amounts(_Counted):
    max_tokens: Count | None = setting("maximum tokens of one response; also the max_tokens of a request without one")


class PerUser(_Counted):
    """The limits of each end user, whom the key's `user_header` names, or without it the field `user` of the body."""

    missing: Literal["shared", "refused", "unlimited"] = setting(
        "requests without an end user: `shared` (they share the limits of one end user), `refused`, or `unlimited` by these limits",
        "shared",
    )
    max_users: Annotated[int, Strict(), Field(ge=1, le=100_000)] = setting(
        "end users that are counted separately; while all of them have use, further ones share the limits of one", 10_000
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> PerUser:
        if not any(getattr(self, name) for name in _Counted.model_fields):
            raise ValueError("contains no limit, e.g. requests_per_minute")
        return self


class ModelLimits(_Amounts):
    """Additional limits for some models."""

    models: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(description="models that share these limits: IDs or patterns with *")


class Limits(_Amounts):
    """The limits of a key or a team."""

    session: SessionBudget | None = setting("budget of each session")
    per_user: PerUser | None = setting("limits of each end user")
    models: tuple[ModelLimits, ...] = setting("additional limits for some models", ())


class _Key(Section):
    """A principal that may use the gateway, with the hashes of its keys."""

    id: Name = Field(description="name of the principal in metrics and usage records")
    hashes: Hashes = setting(
        "hash of its key, or a list of hashes; {hash: sha256:…, expires: 2027-01-01} for a key that expires", (), alias="hash"
    )
    models: Annotated[tuple[Name, ...], Field(min_length=1)] = setting("models that it may use: IDs or patterns with *", ("*",))
    expires: Instant | None = setting("time from which it is refused; a date means 00:00 UTC")
    limits: Limits | None = setting("limits of its use")
    priority: Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)] | None = setting(
        "priority in the gateway's queues (as a share) and in vLLM's scheduler; lower is sooner"
    )
    queue_class: Name | None = setting("class in the gateway's queues, one of `classes`; default: the class `default`", alias="class")
    user_header: HeaderName | None = setting(
        "header that names the end user in usage records and for `limits.per_user`, e.g. X-OpenWebUI-User-Id; only for trusted clients"
    )

    def expired(self, now: datetime) -> bool:
        """Return whether it has expired at the aware datetime ``now``."""
        return self.expires is not None and self.expires <= now


if TYPE_CHECKING:

    class Key(_Key, KeyProperties):  # type: ignore[misc]  # its configuration freezes it, which mypy does not see
        """An entry of `keys`: the settings above, and the properties that a worker reads as they are written."""
else:
    Key = create_model("Key", __base__=_Key, __doc__=_Key.__doc__, __module__=__name__, **declared(KeyProperties))


class SelfService(Section):
    """The keys that people of the team may create for themselves."""

    max_keys: Annotated[int, Strict(), Field(ge=1, le=1000)] = Field(description="maximum number of valid keys of each person in the team")
    max_lifetime: Duration | None = setting("longest time from the creation of a key to its expiry; default: keys need not expire")
    models: Annotated[tuple[Name, ...], Field(min_length=1)] = setting("models that may be chosen: IDs or patterns with *", ("*",))
    limits: Limits | None = setting("ceilings: each key has these limits and budgets, or lower ones")

    @field_serializer("max_lifetime")
    def _in_its_unit(self, seconds: float | None) -> str | None:
        return None if seconds is None else duration_text(seconds)


class Team(Section):
    """Keys that share limits, and a share of queues."""

    id: Name = Field(description="name of the team")
    limits: Limits | None = setting("limits that its keys share")
    weight: _Weight = setting("share of the team in queues, which its keys divide among them", 1.0)
    self_service: SelfService | None = setting("keys that its people may create for themselves; default: none")


class Claims(Section):
    """The claims of a token to use. A name with dots leads into a claim, e.g. realm_access.roles."""

    subject: Name = setting("subject; each one has the limits of its key's entry", "sub")
    key: Name | None = setting("key entry, one of `keys`; required if there are several")
    team: Name | None = setting("team: an ID, or a list, whose first entry in `teams` counts")
    models: Name | None = setting("models that it may use, among the models of its entry: a list, or a text separated by spaces")
    priority: Name | None = setting("priority, a whole number, instead of its entry's")


Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # no symmetric ones: their verification key can also sign
Algorithms = Annotated[tuple[Algorithm, ...], Field(min_length=1)]


class Jwt(Section):
    """An identity provider whose JSON Web Tokens are accepted as keys."""

    issuer: Annotated[Text, requires("tokens require", "jwt", "jwt", "cryptography")] = Field(
        description="issuer in the `iss` claim of its tokens"
    )
    audience: Texts = Field(description="audience that the `aud` claim must contain; of a list, it must contain at least one")
    jwks: KeySet = Field(description="JWKS: a URL or a file")
    ca: ReadableFile | None = setting("file with the certificate authorities for the URL, PEM")
    refresh: Duration = quantity("time between two requests to the URL", "10m")
    keys: Texts = Field(description="entries of `keys` as which its tokens count, one or a list")
    claims: Claims = setting("claims to use", Claims())
    algorithms: Algorithms = setting("accepted signature algorithms", ("RS256", "ES256", "EdDSA"))
    leeway: DurationOrZero = quantity("accepted difference between the clocks of issuer and gateway", "30s")
    token_limit: Size = quantity("maximum size of a token", "8KiB")
    subjects: Annotated[int, Strict(), Field(ge=1, le=100_000)] = setting(
        "subjects that each worker counts separately; further ones share the limits of their entry", 10_000
    )


class LimitsSection(Section):
    """General settings of limits."""

    on_store_failure: Literal["allow", "refuse"] = setting("what happens to requests while the limits store is unreachable", "allow")
    warn_at: Annotated[float, Strict(), Field(gt=0, le=1)] = setting(
        "responses have a warning header once this share of a budget is used", 0.8
    )


class PrefixCacheIsolation(Section):
    """Isolation of keys in vLLM's prefix cache, so that no key can probe the prompts of another."""

    secret: Secret = Field(description="secret for deriving each key's cache salt")


LogLevel = Literal["debug", "info", "warning", "error"]


class Log(Section):
    """The log on standard error, and the access log on standard output."""

    level: LogLevel = setting("lowest level that is written", "info")
    levels: dict[LogPart, LogLevel] = setting(f"levels of single parts, e.g. {{fleet: debug}}; the parts are {', '.join(PARTS)}", {})
    format: Literal["text", "json"] = setting("text lines, or JSON lines", "text")
    user: Flag = setting("write a request's `user` to the access log", False)
    sample: Annotated[float, Strict(), Field(ge=0, le=1)] = setting(
        "share of requests whose body shape is written to the access log: names and sizes without text; 0 to 1", 0.0
    )


class Tracing(Section):
    """The export of traces with OTLP over HTTP."""

    endpoint: Annotated[HttpUrl, requires("tracing requires", "otel", "opentelemetry.exporter.otlp.proto.http")] = Field(
        description="base URL of the collector, e.g. http://otel-collector:4318"
    )
    sample: Annotated[float, Strict(), Field(ge=0, le=1)] = setting("share of requests that are traced, 0 to 1", 1.0)
    trace_url: TraceUrl | None = setting(
        "address of a trace in browsers, with `{trace_id}`, e.g. https://jaeger.example.com/trace/{trace_id}; default: no links"
    )


class Ledger(Section):
    """The usage ledger, with a row for each request. A URL alone is short for `{url: …}`."""

    url: LedgerStore = Field(description="database: sqlite:///FILE, relative to this file, or postgresql://USER@HOST/NAME")
    retention: Duration | None = setting("age after which rows are deleted; default: never")
    user: Flag = setting("store a request's `user`", False)
    metadata: Flag = setting("store a request's `metadata`", False)
    bill_cancelled_prefill: Flag = setting("charge the prompt of a request that its client cancels before the first event", False)
    sample_interval: Duration = quantity("time between two samples of the servers' token counters, for `usage --reconcile`", "15s")


def _is_alone(value: object) -> bool:
    """Return whether a value is a URL alone, or a reference to a secret that is one."""
    return isinstance(value, str) or (isinstance(value, dict) and value.keys() <= {"env", "file"})


def _ledger(value: object, info: ValidationInfo) -> object:
    return {"url": ledger_store(value, info)} if _is_alone(value) else value


class Store(Section):
    """Keys and teams that are made at run time. A URL alone, or `ledger`, is short for `{url: …}`."""

    url: KeyStore = Field(description="database: `ledger`, or a URL as for the ledger; SQLite is for one gateway")
    max_age: Duration = quantity("time for which the known keys are served while the database is away", "24h")


def _store(value: object, info: ValidationInfo) -> object:
    return {"url": key_store(value, info)} if _is_alone(value) else value


class AuditSettings(Section):
    """The audit log, with an entry for each change and each refused attempt."""

    secret: LongSecret = Field(description="secret of the entries' HMACs, at least 16 characters; store it outside of the log")
    file: WrittenFile | None = setting("file of the log, JSON lines; default: a table in the database of `store`, otherwise of `ledger`")
    stdout: Flag = setting("also write each entry to standard output, as a line of JSON", False)


RedactedField = Annotated[str, Strict(), Field(pattern=r"^[^.\s]+(\.[^.\s]+)*$", max_length=256)]
"""The name of a field, or a path with dots."""


def _keys_of_records(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


RecordKeys = Annotated[
    tuple[Secret, ...], Field(min_length=1), BeforeValidator(_keys_of_records, json_schema_input_type=Secret | list[Secret])
]
"""An encryption key, or a list of them."""


class Record(Section):
    """A record of requests with their bodies, for debugging and evaluation. Clients see in a header that a request is recorded."""

    store: Text = Field(description="where records are stored: a folder, or the URL of a bucket, https://HOST/BUCKET/PREFIX")
    keys: Annotated[tuple[Name, ...], Field(min_length=1)] = setting("keys whose requests are recorded: IDs or patterns with *", ("*",))
    models: Annotated[tuple[Name, ...], Field(min_length=1)] = setting("models whose requests are recorded: IDs or patterns with *", ("*",))
    share: Share = setting("share of the requests of these keys and models that is recorded", 0.01, json_schema_extra={"default": "1%"})
    retention: Duration = quantity("age after which records are deleted, by whole days (UTC)", "7d")
    redact: tuple[RedactedField, ...] = setting("fields whose values are not recorded: names, or paths such as messages.*.content", ())
    key: RecordKeys | None = setting("encryption key, base64 of 32 bytes; of a list, the first encrypts; default: no encryption")
    access_key_id: Secret | None = setting("ID of the access key for the bucket")
    secret_access_key: Secret | None = setting("secret of the access key for the bucket")
    region: Text = setting("region of the bucket", "us-east-1")

    @property
    def is_in_bucket(self) -> bool:
        return self.store.startswith(_BUCKET_SCHEMES)

    @field_validator("store")
    @classmethod
    def _is_a_store(cls, store: str, info: ValidationInfo) -> str:
        if not store.startswith(_BUCKET_SCHEMES):
            if "://" in store:
                raise ValueError("expected a folder, or the URL of a bucket such as https://s3.example.com/bucket/records")
            return os.path.abspath(surroundings(info).folder / store)
        parts = urlsplit(store)
        if not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment or not _BUCKET_PATH.fullmatch(parts.path):
            raise ValueError("expected the URL of a bucket such as https://s3.example.com/bucket/records")
        if not installed("obstore"):
            raise ValueError(needs_extra("a bucket requires", "record-s3"))
        return store

    @field_validator("key")
    @classmethod
    def _are_keys(cls, keys: tuple[SecretStr, ...] | None) -> tuple[SecretStr, ...] | None:
        for key in keys or ():
            record_key(key.get_secret_value())
        if keys and not installed("cryptography"):
            raise ValueError(needs_extra("encrypted records require", "record"))
        return keys

    @model_validator(mode="after")
    def _has_credentials(self) -> Record:
        if self.is_in_bucket != (self.access_key_id is not None) or self.is_in_bucket != (self.secret_access_key is not None):
            raise ValueError("a bucket needs access_key_id and secret_access_key, and a folder needs neither")
        return self

    @property
    def encryption_keys(self) -> tuple[bytes, ...]:
        return tuple(record_key(key.get_secret_value()) for key in self.key or ())

    @property
    def credentials(self) -> tuple[str, str] | None:
        if self.access_key_id is None or self.secret_access_key is None:
            return None
        return self.access_key_id.get_secret_value(), self.secret_access_key.get_secret_value()


class SignInClaims(Section):
    """The names of the claims that are read from an ID token. A name with dots leads into a claim, e.g. realm_access.roles."""

    name: Name = setting("name of the person, for display only", "name")
    roles: Name | None = setting("values that `sign_in.roles` maps to roles; default: this issuer grants no role. `email` must be verified")
    teams: Name | None = setting("IDs of the person's teams; default: this issuer grants no team")
    owned_teams: Name | None = setting("IDs of the teams that the person owns; default: none")


class SignInIssuer(Section):
    """An OpenID Connect issuer at which people sign in, with the authorization code flow and PKCE."""

    id: IssuerId = Field(description="ID in the redirect URI, `URL/sign-in/callback/ID`, and in the audit log; must not be reused")
    issuer: Annotated[HttpUrl, requires("issuers require", "oidc", "jwt", "cryptography")] = Field(
        description="issuer URL; its metadata is at `ISSUER/.well-known/openid-configuration`"
    )
    name: Text | None = setting("name on the sign-in page; default: the ID")
    client_id: Text = Field(description="client ID that the issuer has assigned to this gateway")
    client_secret: Secret | None = setting("client secret; default: a public client, with PKCE only")
    scopes: Texts = setting("requested scopes; must contain openid", ("openid", "profile", "email"))
    claims: SignInClaims = setting("claims to use", SignInClaims())
    algorithms: Algorithms = setting("accepted signature algorithms", ("RS256", "ES256", "EdDSA"))
    leeway: DurationOrZero = quantity("accepted difference between the clocks of issuer and gateway", "30s")
    ca: ReadableFile | None = setting("file with the certificate authorities for the issuer, PEM")

    @field_validator("issuer")
    @classmethod
    def _is_an_issuer(cls, issuer: str) -> str:
        if "?" in issuer or "#" in issuer:
            raise ValueError("an issuer has neither a query nor a fragment")
        return issuer

    @field_validator("scopes")
    @classmethod
    def _are_for_openid(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        if "openid" not in scopes:
            raise ValueError("must contain openid")
        return scopes


class SignInSession(Section):
    """The sessions of people who have signed in."""

    idle: Duration = quantity("time without use after which a session ends", "8h")
    lifetime: Duration = quantity("time after the sign-in at which a session ends", "24h")


class SignInRoles(Section):
    """The values of the claim `claims.roles` that grant each role on the admin port. A person gets the highest one."""

    viewer: Texts = setting("values that grant `viewer`: read everything but the audit log", ())
    operator: Texts = setting("values that grant `operator`: also operate models and servers, reload and drain", ())
    admin: Texts = setting("values that grant `admin`: also change keys and teams, and read the audit log", ())


class SignIn(Section):
    """People who sign in, with OpenID Connect or with one-time sign-in links."""

    key: SessionKey = Field(description="secret that signs sessions, at least 32 characters; the same for all gateways")
    url: BrowserUrl | None = setting("address of the data port in browsers, e.g. https://llm.example.com; default: no sign-in there")
    admin_url: BrowserUrl | None = setting("address of the admin port in browsers; default: no sign-in there")
    issuers: tuple[SignInIssuer, ...] = setting("issuers at which people sign in; default: sign-in links only", ())
    roles: SignInRoles = setting("values of claims that grant roles", SignInRoles())
    session: SignInSession = setting("sessions", SignInSession())

    @model_validator(mode="after")
    def _has_an_address(self) -> SignIn:
        if self.url is None and self.admin_url is None:
            raise ValueError("set url, admin_url, or both: the addresses at which browsers reach the ports")
        return self


HolderKind = Literal["team", "key", "user"]
_HOLDER_KIND: dict[str, Any] = {"enum": list(get_args(HolderKind))}
HolderKinds = Annotated[
    tuple[HolderKind, ...],
    Field(min_length=1),
    BeforeValidator(one_text_or_many),
    WithJsonSchema({"oneOf": [_HOLDER_KIND, {"type": "array", "items": _HOLDER_KIND, "minItems": 1}]}),
]
"""A kind of holders of limits, or a list of them."""


class Mail(Section):
    """The recipients of a notice."""

    to: MailAddresses = Field(description="address, or a list of addresses")


class NoticeRule(Section):
    """A receiver of notices about budgets that are nearly used and keys that expire: a webhook or mail."""

    name: Name = Field(description="name in commands and metrics, and part of each notice's ID")
    webhook: Webhook | None = setting("URL to which notices are sent")
    secret: LongSecret | None = setting("secret of the webhook's signatures, at least 16 characters; default: notices are not signed")
    mail: Mail | None = setting("mail instead of a webhook; requires `smtp`")
    at: Annotated[tuple[Share, ...], Field(min_length=1)] = setting(
        "used shares of a budget that are announced", (0.8, 1.0), json_schema_extra={"default": ["80%", "100%"]}
    )
    holders: HolderKinds = setting(
        "holders that are watched, `team`, `key`, `user` (each end user with `per_user`), or a list of them; with `key`, keys are also "
        "announced 7 days before they expire",
        ("team", "key"),
        alias="for",
    )

    @model_validator(mode="after")
    def _has_one_receiver(self) -> NoticeRule:
        if (self.webhook is None) == (self.mail is None):
            raise ValueError("set either webhook or mail")
        if self.secret is not None and self.webhook is None:
            raise ValueError("secret signs the requests of a webhook; mail has none")
        return self


class Smtp(Section):
    """The mail server for notices."""

    host: Name = Field(description="host name or address of the server")
    port: Annotated[int, Strict(), Field(ge=1, le=65535)] = setting("port of the server", 587)
    tls: Literal["starttls", "always", "never"] = setting("TLS: `starttls`, `always` (usually port 465), or `never`", "starttls")
    sender: MailAddress = Field(description="address of the sender", alias="from")
    user: Text | None = setting("user; default: no authentication")
    password: Secret | None = setting("password of the user")

    @model_validator(mode="after")
    def _protects_the_password(self) -> Smtp:
        if (self.user is None) != (self.password is None):
            raise ValueError("set both user and password, or neither")
        if self.password is not None and self.tls == "never":
            raise ValueError("a password is sent only with TLS; set tls to starttls or always")
        return self


class KeysFile(Section):
    """A file with keys only, e.g. a mounted Secret."""

    keys: tuple[Key, ...] = setting("principals that may use the gateway", ())


class Config(Section):
    """The configuration of vllm-gateway."""

    server: ServerSection = setting("the gateway's ports and limits", ServerSection())
    models: tuple[Model, ...] = setting("models that are served", ())
    default_model: Name | None = setting("model for requests without a model; default: the only model that the key may use")
    groups: tuple[Group, ...] = setting("groups of launched models; in each, a limited number runs at the same time", ())
    keys: tuple[Key, ...] = setting("principals that may use the gateway; after loading, also the keys of keys_file", ())
    keys_file: FilePath | None = setting("file with further keys, e.g. a mounted Secret")
    teams: tuple[Team, ...] = setting("keys that share limits, and a share of queues", ())
    classes: tuple[QueueClass, ...] = setting("classes of keys in queues, the most urgent one first", ())
    jwt: tuple[Jwt, ...] = setting("identity providers whose tokens are accepted as keys", ())
    limits: LimitsSection = setting("general settings of limits", LimitsSection())
    limits_store: LimitsStore = setting(
        "where limits are counted: redis://… for several gateways together; default: memory of this gateway"
    )
    ledger: Annotated[Ledger, BeforeValidator(_ledger, json_schema_input_type=LedgerStore | Ledger)] | None = setting(
        "usage ledger: a URL or a section; default: none"
    )
    audit: AuditSettings | None = setting("audit log; default: none")
    record: Record | None = setting("record of requests with their bodies; default: none")
    store: Annotated[Store, BeforeValidator(_store, json_schema_input_type=KeyStore | Store)] | None = setting(
        "keys and teams that are made at run time: a URL, `ledger` or a section; default: none"
    )
    isolate_prefix_cache: PrefixCacheIsolation | None = setting("isolate keys in vLLM's prefix cache")
    sign_in: SignIn | None = setting("people who sign in; default: none")
    log: Log = setting("the log", Log())
    tracing: Tracing | None = setting("export of traces")
    notices: tuple[NoticeRule, ...] = setting("receivers of notices about budgets and keys that expire", ())
    smtp: Smtp | None = setting("mail server for notices; default: none")

    @property
    def served_models(self) -> tuple[Model, ...]:
        """The models with servers: all but the splits."""
        return tuple(model for model in self.models if model.split is None)

    @property
    def model_ids(self) -> dict[str, str]:
        """The ID of the model or LoRA adapter that each name means."""
        return {name: entry.id for model in self.models for entry in model.entries for name in entry.names}

    def may_stop(self, model: Model) -> bool:
        """Return whether a model is launched and not always up.

        It starts on demand, stops or sleeps when idle, shares a group, or shares a GPU with a model that starts on demand.
        """
        if (launch := model.launch) is None:
            return False
        if launch.start == "on_demand" or launch.idle_stop is not None or launch.idle_sleep is not None or launch.group is not None:
            return True
        launches = (other.launch for other in self.models if other.launch is not None)
        return any(other.start == "on_demand" and launch.all_gpus & other.all_gpus for other in launches)

    @property
    def database_url(self) -> str | None:
        """The URL of the store's database, otherwise of the ledger's; None without either."""
        return self.store_url or (None if self.ledger is None else self.ledger.url.get_secret_value())

    @property
    def store_url(self) -> str | None:
        """The URL of the store's database; None without a store."""
        if self.store is None:
            return None
        url = self.store.url.get_secret_value()
        return url if url != OF_LEDGER or self.ledger is None else self.ledger.url.get_secret_value()

    _files: tuple[Path, ...] = PrivateAttr(())
    _withheld: frozenset[str] = PrivateAttr(frozenset())

    @property
    def files(self) -> tuple[Path, ...]:
        """The absolute paths of every file of this configuration, to watch for changes."""
        return self._files

    @property
    def withheld(self) -> frozenset[str]:
        """The environment variables with the gateway's own secrets, which launched servers must not inherit."""
        return self._withheld


def matches(pattern: str, name: str) -> bool:
    """Return whether ``name`` matches ``pattern``. ``*`` matches any text, including slashes."""
    return fnmatchcase(name, pattern)


def plain_variables(variables: dict[str, str | SecretStr]) -> dict[str, str]:
    """Return environment variables with their secrets in plain text, for the process that gets them."""
    return {name: value if isinstance(value, str) else value.get_secret_value() for name, value in variables.items()}
