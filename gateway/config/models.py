"""The configuration as values: every section, setting, default and bound, each declared once.

The YAML, the error messages and the JSON Schema all come from these classes. The rule: a class validates each setting by itself.
``references`` validates relations between settings. It works on the raw document, and so also sees the parts that are invalid here.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    Strict,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from gateway.config.quantities import Duration, DurationOrZero, Share, Size, Window, parse_duration, parse_size
from gateway.config.secret import LedgerStore, LimitsStore, Secret, ledger_store, surroundings
from gateway.config.section import Section, declared, section_of
from gateway.config.values import (
    Balance,
    BodyFields,
    Count,
    FilePath,
    Flag,
    Hashes,
    HeaderName,
    HttpUrl,
    Instant,
    KeySet,
    ListenHost,
    LogPart,
    MediaHost,
    Money,
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
    Variables,
    WeightsSource,
    Workers,
    exists,
    installed,
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


def _quantity(text: str, description: str) -> Any:
    """Return a field for a size or duration. ``text`` is its default, as written in YAML."""
    parse = parse_size if text.endswith("B") else parse_duration
    return Field(default=parse(text), description=description, json_schema_extra={"default": text})


class Admin(Section):
    """The admin port for operators and Prometheus: /metrics, /livez, /readyz, /status."""

    host: ListenHost = Field(default="127.0.0.1", description="address of the admin port; `::` is all addresses, IPv6 and IPv4")
    port: Port = Field(default=9090, description="admin port; 0 selects a free port")
    token: Secret | None = Field(default=None, description="bearer token that the admin port requires")


class Cors(Section):
    """Origins from which browsers may call the gateway. None by default."""

    origins: tuple[Origin, ...] = Field(default=(), description="origins such as https://app.example.com, or *")


class Tls(Section):
    """TLS on the data port. The files are watched, and a renewed certificate is used within seconds."""

    cert: ReadableFile = Field(description="file with the certificate chain, PEM")
    key: ReadableFile = Field(description="file with the private key, PEM")

    @model_validator(mode="after")
    def _belong_together(self) -> Tls:
        try:
            Pair.read(Files(str(self.cert), str(self.key))).check()
        except CertificateError as error:
            raise ValueError(f"cert and key are unusable: {error}") from None
        return self


class ServerSection(Section):
    """The gateway's ports and limits."""

    host: ListenHost = Field(default="0.0.0.0", description="address of the data port; `::` is all addresses, IPv6 and IPv4")  # noqa: S104  clients are on other machines
    port: Port = Field(default=8000, description="data port; 0 selects a free port")
    workers: Workers = Field(default=1, description="worker processes on the data port; `auto`: one for each usable CPU")
    admin: Admin = Field(default=Admin(), description="the admin port")
    tls: Tls | None = Field(default=None, description="TLS on the data port")
    cors: Cors = Field(default=Cors(), description="origins from which browsers may call the gateway")
    docs: Flag = Field(default=False, description="serve the API reference on the data port without a key: /docs and /openapi.json")
    trusted_proxies: tuple[Network, ...] = Field(default=(), description="networks of the proxies whose X-Forwarded-For is trusted")
    max_connections_per_address: Count | None = Field(
        default=None, description="maximum connections of one client address to each worker, not counting those of trusted proxies"
    )
    body_limit: Size = _quantity("20MiB", "maximum size of a request body")
    body_values: Annotated[int, Strict(), Field(ge=2048)] = Field(
        default=500_000, description="maximum number of JSON values in a request body, counted by commas, colons and opening brackets"
    )
    body_memory: Size = _quantity(
        "256MiB", "maximum size of all request bodies in memory, for all workers together; further requests are rejected"
    )
    headers_timeout: Duration = _quantity("10s", "time in which a client must send the headers of a request")
    body_timeout: Duration = _quantity("60s", "time for which a client may send its body slower than 1 KiB/s")
    write_timeout: Duration = _quantity("60s", "time for which a client may not read its response")
    max_inflight: Count | None = Field(
        default=None, description="maximum concurrent requests of the whole gateway, including queued ones; further requests are rejected"
    )
    linger: DurationOrZero = _quantity("0s", "time between the stop signal and the drain, in which /readyz fails and requests are served")
    drain: DurationOrZero = _quantity("30s", "time in which open requests may finish when the gateway stops")


MAX_REPLICAS = 1024


class Launch(Section):
    """A model whose servers the gateway launches."""

    command: Annotated[tuple[Text, ...], Field(min_length=1)] = Field(default=("vllm", "serve"), description="command that starts a server")
    model: WeightsSource | None = Field(
        default=None, description="model that the server loads: a name on the hub or a folder; default: the model's ID"
    )
    preset: Preset | None = Field(
        default=None, description="model family; sets the parsers for tool calls and reasoning that `args` does not set"
    )
    replicas: Annotated[int, Strict(), Field(ge=1, le=MAX_REPLICAS)] = Field(default=1, description="number of servers")
    gpus: tuple[tuple[Annotated[int, Strict(), Field(ge=0)], ...], ...] | None = Field(
        default=None, description="GPU numbers of each replica, e.g. [[0, 1], [2, 3]]"
    )
    args: Options = Field(
        default={},
        description="options of the command without dashes; true and false for flags, a list for a repeated option, a mapping for JSON",
    )
    env: Variables = Field(default={}, description="environment variables of the server; secrets as {env: NAME} or {file: PATH}")
    start: Literal["eager", "on_demand"] = Field(
        default="eager", description="when the servers start: with the gateway, or on the first request"
    )
    idle_stop: Duration | None = Field(default=None, description="stop the servers after this time without requests")
    idle_sleep: Duration | None = Field(default=None, description="put the servers to sleep after this time without requests")
    sleep_level: Literal[1, 2] = Field(
        default=1, description="sleep level: 1 moves the weights to main memory, 2 loads them again on wake-up"
    )
    group: Name | None = Field(default=None, description="group that limits how many of its models run at the same time; see `groups`")
    startup_timeout: Duration = _quantity("20m", "time in which a server must become healthy after its start")

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
    model: Name | None = Field(default=None, description="name under which it serves the model; default: the model's ID")
    api_key: Secret | None = Field(default=None, description="API key that it requires")
    weight: Annotated[int, Strict(), Field(ge=1, le=1000)] = Field(
        default=1, description="share of the requests relative to the other servers"
    )

    @property
    def address(self) -> Address:
        return Address.parse(self.url)


class Kubernetes(Section):
    """The servers of a Kubernetes service, from its EndpointSlices."""

    service: Name = Field(description="name of the service")
    namespace: Name | None = Field(default=None, description="namespace of the service; default: the gateway's own")
    port: NamedPort | None = Field(default=None, description="number or name of the port; default: the service's only port")


class Dns(Section):
    """The servers behind a DNS name that resolves to all their addresses."""

    name: Name = Field(description="name to resolve")
    port: Annotated[int, Strict(), Field(ge=1, le=65535)] = Field(default=8000, description="port of every server")
    interval: Duration = _quantity("10s", "time between two lookups")


class Discover(Section):
    """Servers that are discovered at runtime, with Kubernetes or DNS."""

    kubernetes: Kubernetes | None = Field(default=None, description="a Kubernetes service")
    dns: Dns | None = Field(default=None, description="a DNS name")
    model: Name | None = Field(default=None, description="name under which they serve the model; default: the model's ID")
    api_key: Secret | None = Field(default=None, description="API key that they require")


class Timeouts(Section):
    """The timeouts of a model's servers."""

    connect: Duration = _quantity("2s", "from the connection attempt to the connection")
    first_byte: Duration = _quantity("120s", "from the request to the first byte of the response")
    idle: Duration = _quantity("60s", "between two reads of a response")
    total: Duration = _quantity("1h", "for the whole request")


class Queue(Section):
    """The queue for requests while no server of the model is up, or all are at `max_inflight`."""

    size: Count = Field(default=128, description="maximum number of queued requests; further requests are rejected")
    wait: Duration = _quantity("30s", "maximum time in the queue")


class Lora(Section):
    """A LoRA adapter of the model, which clients request by its own ID."""

    id: Name = Field(description="ID that clients send in `model`")
    aliases: tuple[Name, ...] = Field(default=(), description="further names for clients")
    path: WeightsSource | None = Field(default=None, description="what a launched server loads: a name on the hub or a folder")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may use, the ID first."""
        return (self.id, *self.aliases)


class Body(Section):
    """The fields that a request body may contain."""

    allow: tuple[Name, ...] = Field(default=(), description="fields to pass on that are refused, removed or limited by default")
    refuse: tuple[Name, ...] = Field(default=(), description="fields to refuse in addition to the default ones")
    max_n: Count | None = Field(default=None, description="maximum of n and best_of; default: 128")
    max_tokens: Count | None = Field(
        default=None,
        description="maximum of max_tokens, max_completion_tokens and max_output_tokens; also set on requests without any of them",
    )
    media_hosts: tuple[MediaHost, ...] = Field(
        default=(), description="hosts for image, audio and video URLs, e.g. *.example.com, or * for any; default: data: URLs only"
    )


class Mirror(Section):
    """Copies of a share of the model's requests for another model. The responses to the copies are discarded."""

    to: Name = Field(description="model that gets the copies")
    share: Share = Field(description="share of the requests that are copied")
    max_inflight: Count = Field(default=16, description="maximum copies in flight; without capacity, a request is not copied")


_Price = Annotated[int, Money(least=0, most=MAX_PRICE)]


class Price(Section):
    """Prices of tokens, in one currency for all models, with up to 9 decimals."""

    prompt: _Price = Field(default=0, description="price of a million prompt tokens")
    completion: _Price = Field(default=0, description="price of a million completion tokens")
    cached: _Price | None = Field(default=None, description="price of a million prompt tokens from the prefix cache; default: as `prompt`")
    reasoning: _Price | None = Field(default=None, description="price of a million reasoning tokens; default: as `completion`")


_POLICIES_WITH_SETTINGS = tuple(name for name, policy in policies.POLICIES.items() if fields(policy.settings))
S = TypeVar("S", bound=Section)
B = TypeVar("B", "Budget", "SessionBudget")


def _with_policy_settings(model: type[S]) -> type[S]:
    """Return the section of a model with a section for each balance policy that has settings."""
    sections: dict[str, Any] = {}
    for name in _POLICIES_WITH_SETTINGS:
        section = section_of(f"{name}_policy", policies.POLICIES[name].settings, f"Settings of the balance policy `{name}`.")
        sections[f"{name}_policy"] = (section | None, Field(default=None, description=f"settings of `balance: {name}`"))
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, __module__=__name__, **sections)


Weight = Annotated[int, Strict(), Field(ge=0, le=1_000_000)]
Task = Literal["chat", "completion", "embedding", "rerank", "classify", "transcription"]
Capability = Literal["tools", "reasoning", "structured_outputs", "image", "audio", "video"]


@_with_policy_settings
class Model(Section):
    """A model and its servers."""

    id: Name = Field(description="ID that clients send in `model`")
    aliases: tuple[Name, ...] = Field(default=(), description="further names for clients")
    mounts: tuple[Mount, ...] = Field(default=(), description="path prefixes that serve only this model, e.g. /team/model")
    launch: Launch | None = Field(default=None, description="servers that the gateway launches; {} for the defaults")
    servers: Annotated[tuple[Server, ...], Field(min_length=1)] | None = Field(
        default=None, description="servers that the gateway does not launch"
    )
    discover: Discover | None = Field(default=None, description="servers that are discovered at runtime")
    split: Annotated[dict[Name, Weight], Field(min_length=1)] | None = Field(
        default=None,
        description="models between which the requests for this name are divided, with their weights, e.g. {model-a: 95, model-b: 5}",
    )
    sticky: Literal["key", "session"] | None = Field(
        default=None, description="with `split`: requests of one key, or of one session, always go to the same model"
    )
    loras: tuple[Lora, ...] = Field(default=(), description="LoRA adapters of the model")
    balance: Balance = Field(default=policies.DEFAULT, description="how a server is selected")
    timeouts: Timeouts = Field(default=Timeouts(), description="timeouts of the servers")
    queue: Queue | None = Field(
        default=None,
        description="queue for requests that wait for a server; default: {} for `servers`, with `max_inflight`, and for launched models "
        "that may stop",
    )
    max_inflight: Count | None = Field(
        default=None, description="maximum concurrent requests on each server; further requests wait in `queue`"
    )
    keepalive: Duration | None = Field(
        default=None, description="interval of SSE comments on an idle stream, so that proxies do not close it"
    )
    defaults: BodyFields = Field(default={}, description="body fields for requests that do not set them")
    overrides: BodyFields = Field(default={}, description="body fields that replace the request's")
    body: Body = Field(default=Body(), description="fields that a request body may contain")
    fallbacks: tuple[Name, ...] = Field(
        default=(), description="models to try in this order when no server of this model can take the request"
    )
    mirror: Mirror | None = Field(default=None, description="copies of a share of the requests for another model, for tests of that model")
    rewrite_model: Flag = Field(default=False, description="replace the model name in responses by this ID")
    running_usage: Flag = Field(
        default=True, description="count truncated streams exactly, if a ledger or a limit counts their tokens; false: by their events"
    )
    price: Price | None = Field(default=None, description="prices of its tokens")
    task: Task | None = Field(default=None, description="task in the model list; default: from the launch arguments and the servers")
    capabilities: tuple[Capability, ...] | None = Field(
        default=None, description="capabilities in the model list; default: from the launch arguments"
    )

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
    def names(self) -> tuple[str, ...]:
        """The names that clients may use, the ID first."""
        return (self.id, *self.aliases)

    @property
    def entries(self) -> tuple[Model | Lora, ...]:
        """The model and its LoRA adapters."""
        return (self, *self.loras)

    @property
    def is_split(self) -> bool:
        """Whether it has no servers, and other models serve its requests."""
        return self.split is not None


class Group(Section):
    """Launched models of which a limited number runs at the same time."""

    id: Name = Field(description="name of the group, for `launch.group`")
    max_running: Count = Field(default=1, description="maximum number of models that run at the same time")


_Cost = Annotated[int, Money(above=0, most=MAX_COST_LIMIT)]


def _counts_something(budget: B) -> B:
    if budget.tokens is None and budget.cost is None:
        raise ValueError("contains no budget: set tokens, cost, or both")
    return budget


class Budget(Section):
    """A budget of tokens, of cost, or of both in a window of time."""

    window: Window = Field(description="`day`, `week` (from Monday) or `month` of UTC, or the length of a rolling window, e.g. `7d`")
    tokens: Count | None = Field(default=None, description="prompt and completion tokens")
    cost: _Cost | None = Field(default=None, description="cost, by the models' prices")
    soft: Flag = Field(default=False, description="only warn: in a header, a metric and the log; no request is refused")

    _check = model_validator(mode="after")(_counts_something)


class SessionBudget(Section):
    """The budget of each session: of all requests with the same `x-session-id` or `metadata.session_id`."""

    tokens: Count | None = Field(default=None, description="prompt and completion tokens of a session")
    cost: _Cost | None = Field(default=None, description="cost of a session, by the models' prices")

    _check = model_validator(mode="after")(_counts_something)


class _Amounts(Section):
    requests_per_minute: Count | None = Field(default=None, description="requests per minute")
    tokens_per_minute: Count | None = Field(default=None, description="prompt and completion tokens per minute")
    tokens_per_day: Count | None = Field(default=None, description="prompt and completion tokens per day (UTC)")
    tokens_per_week: Count | None = Field(default=None, description="prompt and completion tokens per week (UTC, from Monday)")
    tokens_per_month: Count | None = Field(default=None, description="prompt and completion tokens per month (UTC)")
    cost_per_day: _Cost | None = Field(default=None, description="cost per day (UTC), by the models' prices")
    cost_per_week: _Cost | None = Field(default=None, description="cost per week (UTC, from Monday), by the models' prices")
    cost_per_month: _Cost | None = Field(default=None, description="cost per month (UTC), by the models' prices")
    concurrent: Count | None = Field(default=None, description="concurrent requests")
    max_tokens: Count | None = Field(
        default=None, description="maximum tokens of one response; also the max_tokens of a request without one"
    )
    budgets: Annotated[tuple[Budget, ...], Field(max_length=8)] = Field(
        default=(), description="further budgets: of rolling windows, and soft budgets, which only warn"
    )

    @field_validator("budgets")
    @classmethod
    def _differ(cls, budgets: tuple[Budget, ...]) -> tuple[Budget, ...]:
        if len({(each.window, each.soft) for each in budgets}) < len(budgets):
            raise ValueError("two entries have the same window; write tokens and cost into one entry")
        return budgets


class ModelLimits(_Amounts):
    """Additional limits for some models."""

    models: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(description="models that share these limits: IDs or patterns with *")


class Limits(_Amounts):
    """The limits of a key or a team."""

    session: SessionBudget | None = Field(default=None, description="budget of each session")
    models: tuple[ModelLimits, ...] = Field(default=(), description="additional limits for some models")


class _Key(Section):
    """A principal that may use the gateway, with the hashes of its keys."""

    id: Name = Field(description="name of the principal in metrics and usage records")
    hashes: Hashes = Field(
        default=(),
        alias="hash",
        description="hash of its key, or a list of hashes; {hash: sha256:…, expires: 2027-01-01} for a key that expires",
    )
    models: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        default=("*",), description="models that it may use: IDs or patterns with *"
    )
    expires: Instant | None = Field(default=None, description="time from which it is refused; a date means 00:00 UTC")
    limits: Limits | None = Field(default=None, description="limits of its use")
    priority: Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None,
        description="priority in the gateway's queues (as a share) and in vLLM's scheduler; lower is sooner",
    )
    user_header: HeaderName | None = Field(
        default=None, description="header that names the end user in its usage records, e.g. X-OpenWebUI-User-Id; only for trusted clients"
    )

    def expired(self, now: datetime) -> bool:
        """Return whether it has expired at the aware datetime ``now``."""
        return self.expires is not None and self.expires <= now


if TYPE_CHECKING:

    class Key(_Key, KeyProperties):  # type: ignore[misc]  # its configuration freezes it, which mypy does not see
        """An entry of `keys`: the settings above, and the properties that a worker reads as they are written."""
else:
    Key = create_model("Key", __base__=_Key, __doc__=_Key.__doc__, __module__=__name__, **declared(KeyProperties))


class Team(Section):
    """Keys that share limits."""

    id: Name = Field(description="name of the team")
    limits: Limits | None = Field(default=None, description="limits that its keys share")


class Claims(Section):
    """The claims of a token to use. A name with dots leads into a claim, e.g. realm_access.roles."""

    subject: Name = Field(default="sub", description="subject; each one has the limits of its key's entry")
    key: Name | None = Field(default=None, description="key entry, one of `keys`; required if there are several")
    team: Name | None = Field(default=None, description="team: an ID, or a list of which the first entry in `teams` counts")
    models: Name | None = Field(default=None, description="models that it may use, of those of its entry: a list, or a text with spaces")
    priority: Name | None = Field(default=None, description="priority, a whole number, instead of its entry's")


Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # no symmetric ones: their verification key can also sign


class Jwt(Section):
    """An identity provider whose JSON Web Tokens are accepted as keys."""

    issuer: Text = Field(description="issuer in the `iss` claim of its tokens")
    audience: Texts = Field(description="audience that the `aud` claim must contain, or a list of which it must contain one")
    jwks: KeySet = Field(description="JWKS: a URL or a file")
    ca: ReadableFile | None = Field(default=None, description="file with the certificate authorities for the URL, PEM")
    refresh: Duration = _quantity("10m", "time between two requests to the URL")
    keys: Texts = Field(description="entries of `keys` as which its tokens count, one or a list")
    claims: Claims = Field(default=Claims(), description="claims to use")
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = Field(
        default=("RS256", "ES256", "EdDSA"), description="accepted signature algorithms"
    )
    leeway: DurationOrZero = _quantity("30s", "accepted difference between the clocks of issuer and gateway")
    token_limit: Size = _quantity("8KiB", "maximum size of a token")
    subjects: Annotated[int, Strict(), Field(ge=1, le=100_000)] = Field(
        default=10_000, description="subjects that each worker counts separately; further ones share the limits of their entry"
    )

    @field_validator("issuer")
    @classmethod
    def _can_be_checked(cls, issuer: str) -> str:
        if not installed("jwt", "cryptography"):
            raise ValueError("tokens require packages that are not installed: the extra `jwt` (pip install 'vllm-gateway[jwt]')")
        return issuer


class LimitsSection(Section):
    """General settings of limits."""

    on_store_failure: Literal["allow", "refuse"] = Field(
        default="allow", description="what happens to requests while the limits store is unreachable"
    )
    warn_at: Annotated[float, Strict(), Field(gt=0, le=1)] = Field(
        default=0.8, description="used share of a budget from which on responses have a warning header"
    )


class PrefixCacheIsolation(Section):
    """Isolation of keys in vLLM's prefix cache, so that no key can probe the prompts of another."""

    secret: Secret = Field(description="secret from which each key's cache salt is derived")


LogLevel = Literal["debug", "info", "warning", "error"]


class Log(Section):
    """The log on standard error, and the access log on standard output."""

    level: LogLevel = Field(default="info", description="lowest level that is written")
    levels: dict[LogPart, LogLevel] = Field(
        default={}, description=f"levels of single parts, e.g. {{fleet: debug}}; the parts are {', '.join(PARTS)}"
    )
    format: Literal["text", "json"] = Field(default="text", description="text lines, or JSON lines")
    user: Flag = Field(default=False, description="write a request's `user` to the access log")
    sample: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(
        default=0.0,
        description="share of requests whose body shape is written to the access log: names and sizes without text; 0 to 1",
    )


class Tracing(Section):
    """The export of traces with OTLP over HTTP."""

    endpoint: HttpUrl = Field(description="base URL of the collector, e.g. http://otel-collector:4318")
    sample: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(default=1.0, description="share of requests that are traced, 0 to 1")

    @field_validator("endpoint")
    @classmethod
    def _can_be_exported(cls, endpoint: str) -> str:
        if not installed("opentelemetry.exporter.otlp.proto.http"):
            raise ValueError("tracing requires packages that are not installed: the extra `otel` (pip install 'vllm-gateway[otel]')")
        return endpoint


class Ledger(Section):
    """The usage ledger, with a row for each request. A URL alone is short for `{url: …}`."""

    url: LedgerStore = Field(description="database: sqlite:///FILE, relative to this file, or postgresql://USER@HOST/NAME")
    retention: Duration | None = Field(default=None, description="age after which rows are deleted; default: never")
    user: Flag = Field(default=False, description="store a request's `user`")
    metadata: Flag = Field(default=False, description="store a request's `metadata`")
    bill_cancelled_prefill: Flag = Field(
        default=False, description="charge the prompt of a request that its client cancels before the first event"
    )
    sample_interval: Duration = _quantity("15s", "time between two samples of the servers' token counters, for `usage --reconcile`")


def _ledger(value: object, info: ValidationInfo) -> object:
    """Accept a URL alone, or a reference to a secret that is one."""
    alone = isinstance(value, str) or (isinstance(value, dict) and value.keys() <= {"env", "file"})
    return {"url": ledger_store(value, info)} if alone else value


class KeysFile(Section):
    """A file with keys only, e.g. a mounted Secret."""

    keys: tuple[Key, ...] = Field(default=(), description="principals that may use the gateway")


class Config(Section):
    """The configuration of vllm-gateway."""

    server: ServerSection = Field(default=ServerSection(), description="the gateway's ports and limits")
    models: tuple[Model, ...] = Field(default=(), description="models that are served")
    default_model: Name | None = Field(
        default=None, description="model for requests without a model; default: the only model that the key may use"
    )
    groups: tuple[Group, ...] = Field(default=(), description="launched models of which a limited number runs at the same time")
    keys: tuple[Key, ...] = Field(default=(), description="principals that may use the gateway; after loading also those of keys_file")
    keys_file: FilePath | None = Field(default=None, description="file with further keys, e.g. a mounted Secret")
    teams: tuple[Team, ...] = Field(default=(), description="keys that share limits")
    jwt: tuple[Jwt, ...] = Field(default=(), description="identity providers whose tokens are accepted as keys")
    limits: LimitsSection = Field(default=LimitsSection(), description="general settings of limits")
    limits_store: LimitsStore = Field(
        default=None, description="where limits are counted: redis://… for several gateways together; default: memory of this gateway"
    )
    ledger: Annotated[Ledger, BeforeValidator(_ledger, json_schema_input_type=LedgerStore | Ledger)] | None = Field(
        default=None, description="usage ledger: a URL or a section; default: none"
    )
    isolate_prefix_cache: PrefixCacheIsolation | None = Field(default=None, description="isolate keys in vLLM's prefix cache")
    log: Log = Field(default=Log(), description="the log")
    tracing: Tracing | None = Field(default=None, description="export of traces")

    @property
    def served_models(self) -> tuple[Model, ...]:
        """The models with servers: all but the splits."""
        return tuple(model for model in self.models if not model.is_split)

    @property
    def model_ids(self) -> dict[str, str]:
        """The ID of the model or LoRA adapter that each name means."""
        return {name: entry.id for model in self.models for entry in model.entries for name in entry.names}

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
