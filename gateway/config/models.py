"""The configuration as values: every section, setting, default and bound, each declared once.

The YAML, the error messages and the JSON Schema all come from these classes. The rule: a class judges each
setting by itself; what settings say about each other is judged in ``references``, which works on the raw
document and so also sees the parts that are wrong here.
"""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.config.quantities import Duration, DurationOrZero, Size, parse_duration, parse_size
from gateway.config.secret import LedgerStore, LimitsStore, Secret, ledger_store, surroundings
from gateway.config.values import (
    Balance,
    BodyFields,
    Count,
    FilePath,
    Flag,
    Hashes,
    HttpUrl,
    Instant,
    KeySet,
    LogPart,
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
    Variables,
    WeightsPlace,
    exists,
    installed,
)
from gateway.system.logs import PARTS
from gateway.system.tls import CertificateError, Pair
from gateway.system.tls import Tls as Files
from upstream.balancing import policies
from upstream.http.address import Address
from upstream.vllm import path_options
from upstream.vllm.command_line import takes_vllms_flags
from upstream.vllm.installed_vllm import runs_vllm_itself


class Section(BaseModel):
    """What every part of the configuration is: unknown keys are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _quantity(text: str, description: str) -> Any:
    """A size or duration whose default is ``text``, as the operator would write it."""
    parse = parse_size if text.endswith("B") else parse_duration
    return Field(default=parse(text), description=description, json_schema_extra={"default": text})


class Admin(Section):
    """Where operators and Prometheus look: /metrics, /livez, /readyz, /status."""

    host: Text = Field(default="127.0.0.1", description="address that the admin port listens on; `::` is every address, IPv6 and IPv4")
    port: Port = Field(default=9090, description="admin port; 0 takes a free one")
    token: Secret | None = Field(default=None, description="bearer token that the admin port asks for")


class Cors(Section):
    """Browsers that may call the gateway from another origin; off by default."""

    origins: tuple[Origin, ...] = Field(default=(), description="origins such as https://app.example.com, or *")


class Tls(Section):
    """TLS on the data port. The files are followed: a renewed certificate is taken over within seconds."""

    cert: ReadableFile = Field(description="file with the certificate chain, PEM")
    key: ReadableFile = Field(description="file with the private key, PEM")

    @model_validator(mode="after")
    def _belong_together(self) -> Tls:
        try:
            Pair.read(Files(str(self.cert), str(self.key))).check()
        except CertificateError as error:
            raise ValueError(f"cert and key cannot be used: {error}") from None
        return self


class ServerSection(Section):
    """The gateway's own ports and bounds."""

    host: Text = Field(default="0.0.0.0", description="address that the data port listens on; `::` is every address, IPv6 and IPv4")  # noqa: S104  clients are elsewhere
    port: Port = Field(default=8000, description="data port; 0 takes a free one")
    workers: Annotated[int, Strict(), Field(ge=1, le=256)] = Field(default=1, description="worker processes on the data port")
    admin: Admin = Field(default=Admin(), description="the admin port")
    tls: Tls | None = Field(default=None, description="TLS on the data port")
    cors: Cors = Field(default=Cors(), description="browsers that may call the gateway")
    docs: Flag = Field(default=False, description="serve the API reference on the data port, to everybody: /docs and /openapi.json")
    trusted_proxies: tuple[Network, ...] = Field(default=(), description="networks of the proxies whose X-Forwarded-For is believed")
    max_connections_per_address: Count | None = Field(
        default=None, description="connections that one client address may have to each worker; those of trusted proxies do not count"
    )
    body_limit: Size = _quantity("20MiB", "largest request body")
    body_values: Annotated[int, Strict(), Field(ge=2048)] = Field(
        default=500_000, description="JSON values in a request body, counted by its commas, colons and opening brackets"
    )
    body_memory: Size = _quantity("256MiB", "bytes of request bodies that all workers together hold at once; more are refused")
    headers_timeout: Duration = _quantity("10s", "time a client has to send the head of a request")
    body_timeout: Duration = _quantity("60s", "time for which a client may send nothing of its body, or less than 1 KiB/s of it")
    write_timeout: Duration = _quantity("60s", "time for which a client may read nothing of its answer")
    max_inflight: Count | None = Field(
        default=None, description="requests at once in the whole gateway, those that wait included; more are refused"
    )
    linger: DurationOrZero = _quantity("0s", "time between the word to stop and the drain, in which /readyz fails and requests are served")
    drain: DurationOrZero = _quantity("30s", "time that requests under way have to end when the gateway stops")


class Launch(Section):
    """A model whose servers the gateway starts itself."""

    command: Annotated[tuple[Text, ...], Field(min_length=1)] = Field(default=("vllm", "serve"), description="what starts a server")
    model: WeightsPlace | None = Field(
        default=None, description="what the server loads: a name on the hub or a folder; default: the model's id"
    )
    preset: Preset | None = Field(
        default=None, description="the model's family: sets the parsers for tool calls and reasoning that `args` does not set"
    )
    replicas: Annotated[int, Strict(), Field(ge=1, le=1024)] = Field(default=1, description="servers to start")
    gpus: tuple[tuple[Annotated[int, Strict(), Field(ge=0)], ...], ...] | None = Field(
        default=None, description="for each replica, the numbers of its GPUs, e.g. [[0, 1], [2, 3]]"
    )
    args: Options = Field(
        default={}, description="options of the command without dashes; true and false for flags, a list to repeat one, a mapping for JSON"
    )
    env: Variables = Field(default={}, description="environment variables of the server; secrets as {env: NAME} or {file: PATH}")
    start: Literal["eager", "on_demand"] = Field(default="eager", description="when to start: with the gateway, or at the first request")
    idle_stop: Duration | None = Field(default=None, description="stop the servers when the model was unused for this long")
    idle_sleep: Duration | None = Field(default=None, description="put the servers to sleep when the model was unused for this long")
    sleep_level: Literal[1, 2] = Field(
        default=1, description="how deep they sleep: 1 keeps the weights in the machine's memory, 2 reads them again on waking"
    )
    group: Name | None = Field(default=None, description="models of one group run only so many at once; see `groups`")
    startup_timeout: Duration = _quantity("20m", "time a server has from its start until it is healthy")

    @field_validator("command")
    @classmethod
    def _programs_of_the_folder(cls, command: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return path_options.absolute_words(command, surroundings(info).folder, exists)

    @field_validator("args")
    @classmethod
    def _files_of_the_folder(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Relative paths begin at the configuration's folder. A missing file is watched, so that its arrival is noticed."""
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
    """A server that runs already."""

    url: ServerUrl = Field(description="where it listens: http://host:port, https://… or unix:/path/to.sock")
    model: Name | None = Field(default=None, description="the name it serves the model under; default: the model's id")
    api_key: Secret | None = Field(default=None, description="the key it asks for")
    weight: Annotated[int, Strict(), Field(ge=1, le=1000)] = Field(
        default=1, description="its share of the requests next to the other servers"
    )

    @property
    def address(self) -> Address:
        return Address.parse(self.url)


class Kubernetes(Section):
    """Servers behind a Kubernetes service, by its EndpointSlices."""

    service: Name = Field(description="name of the service")
    namespace: Name | None = Field(default=None, description="its namespace; default: the gateway's own")
    port: NamedPort | None = Field(default=None, description="number or name of the port; default: the service's only one")


class Dns(Section):
    """Servers behind a name that resolves to all their addresses."""

    name: Name = Field(description="name to resolve")
    port: Annotated[int, Strict(), Field(ge=1, le=65535)] = Field(default=8000, description="port of every server")
    interval: Duration = _quantity("10s", "time between look-ups")


class Discover(Section):
    """Servers that come and go: found by Kubernetes or by DNS."""

    kubernetes: Kubernetes | None = Field(default=None, description="a Kubernetes service")
    dns: Dns | None = Field(default=None, description="a DNS name")
    model: Name | None = Field(default=None, description="the name they serve the model under; default: the model's id")
    api_key: Secret | None = Field(default=None, description="the key they ask for")


class Timeouts(Section):
    """How long a server may take."""

    connect: Duration = _quantity("2s", "until the connection is there")
    first_byte: Duration = _quantity("120s", "from the request to the first byte of the answer")
    idle: Duration = _quantity("60s", "between two reads of an answer")
    total: Duration = _quantity("1h", "for the whole exchange")


class Queue(Section):
    """Requests that wait while no server of the model is up yet, or all have their `max_inflight`."""

    size: Count = Field(default=128, description="requests that may wait; more are refused")
    wait: Duration = _quantity("30s", "longest wait")


class Lora(Section):
    """A LoRA adapter of the model, asked for by its own id."""

    id: Name = Field(description="the name that clients ask for")
    aliases: tuple[Name, ...] = Field(default=(), description="other names for it")
    path: WeightsPlace | None = Field(default=None, description="where a launched server loads it from: a name on the hub or a folder")

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may call it: the id first."""
        return (self.id, *self.aliases)


class Body(Section):
    """What a request's body may hold."""

    allow: tuple[Name, ...] = Field(default=(), description="fields to let through that are refused, stripped or bounded otherwise")
    refuse: tuple[Name, ...] = Field(default=(), description="fields to refuse besides the usual ones")
    max_n: Count | None = Field(default=None, description="largest n and best_of; default: 128")
    max_tokens: Count | None = Field(
        default=None, description="largest max_tokens, max_completion_tokens and max_output_tokens; also for requests that name none"
    )
    media_hosts: tuple[MediaHost, ...] = Field(
        default=(), description="hosts that image, audio and video URLs may name, e.g. *.example.com; * for any; default: data: URLs only"
    )


_Price = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]  # a request's cost is to fit into the ledger


class Price(Section):
    """What tokens cost, in any one currency, the same for all models, per million tokens."""

    prompt: _Price = Field(default=0.0, description="per million prompt tokens")
    completion: _Price = Field(default=0.0, description="per million completion tokens")


Task = Literal["chat", "completion", "embedding", "rerank", "classify", "transcription"]
Capability = Literal["tools", "reasoning", "structured_outputs", "image", "audio", "video"]


class Model(Section):
    """A model that clients ask for, and the servers behind it."""

    id: Name = Field(description="the model's id, as clients send it in `model`")
    aliases: tuple[Name, ...] = Field(default=(), description="other names for it")
    mounts: tuple[Mount, ...] = Field(default=(), description="paths below which this model alone is served, e.g. /team/model")
    launch: Launch | None = Field(default=None, description="the gateway starts the servers; {} for the defaults")
    servers: Annotated[tuple[Server, ...], Field(min_length=1)] | None = Field(default=None, description="servers that run already")
    discover: Discover | None = Field(default=None, description="servers that come and go")
    loras: tuple[Lora, ...] = Field(default=(), description="LoRA adapters of the model")
    balance: Balance = Field(default=policies.DEFAULT, description="how a server is chosen")
    timeouts: Timeouts = Field(default=Timeouts(), description="how long a server may take")
    queue: Queue | None = Field(
        default=None,
        description="requests that wait for a server; default: {} with `max_inflight`, and for a launched model that may be stopped",
    )
    max_inflight: Count | None = Field(default=None, description="requests at once on each server; more wait in `queue`")
    keepalive: Duration | None = Field(
        default=None, description="send a comment on a silent stream this often, so that proxies keep it open"
    )
    defaults: BodyFields = Field(default={}, description="body fields that a request gets when it does not set them")
    overrides: BodyFields = Field(default={}, description="body fields that win over the request's")
    body: Body = Field(default=Body(), description="what a request's body may hold")
    fallbacks: tuple[Name, ...] = Field(default=(), description="models to try, in order, when no server of this one can take the request")
    rewrite_model: Flag = Field(default=False, description="put this model's id into the answers of servers that know it by another name")
    price: Price | None = Field(default=None, description="what its tokens cost")
    task: Task | None = Field(
        default=None, description="what it is for, as the model list shows it; default: what launch arguments and servers say"
    )
    capabilities: tuple[Capability, ...] | None = Field(
        default=None, description="everything that it can do, as the model list shows it; default: what launch arguments say"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may call it: the id first."""
        return (self.id, *self.aliases)


class Group(Section):
    """Launched models that share what they run on, so that only so many run at once."""

    id: Name = Field(description="name of the group, as launch.group has it")
    max_running: Count = Field(default=1, description="models of the group that run at once")


_Cost = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]


class _Amounts(Section):
    requests_per_minute: Count | None = Field(default=None, description="requests in a minute")
    tokens_per_minute: Count | None = Field(default=None, description="prompt and completion tokens in a minute")
    tokens_per_day: Count | None = Field(default=None, description="prompt and completion tokens in a day of UTC")
    tokens_per_month: Count | None = Field(default=None, description="prompt and completion tokens in a month of UTC")
    cost_per_day: _Cost | None = Field(default=None, description="cost in a day of UTC, by the models' prices")
    cost_per_month: _Cost | None = Field(default=None, description="cost in a month of UTC, by the models' prices")
    concurrent: Count | None = Field(default=None, description="requests at once")
    max_tokens: Count | None = Field(default=None, description="tokens of one answer; for a request that does not say, also its max_tokens")


class ModelLimits(_Amounts):
    """Limits for some models, in addition to the others."""

    models: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(description="the models that share them: ids or patterns with *")


class Limits(_Amounts):
    """How much a key or a team may use."""

    models: tuple[ModelLimits, ...] = Field(default=(), description="limits for some models, in addition to these")


class Key(Section):
    """Who may use the gateway: a principal, known by the hashes of its keys."""

    id: Name = Field(description="name of the principal, as metrics and usage records show it")
    hashes: Hashes = Field(
        default=(),
        alias="hash",
        description="the hash of its key, or a list of them; {hash: sha256:…, expires: 2027-01-01} for one that ends",
    )
    revoked: Flag = Field(default=False, description="its keys are refused from now on")
    anonymous: Flag = Field(default=False, description="this entry is for requests that bring no key")
    models: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        default=("*",), description="models it may use: ids or patterns with *"
    )
    expires: Instant | None = Field(default=None, description="from then on it is refused; a date means its first moment, in UTC")
    limits: Limits | None = Field(default=None, description="how much it may use")
    team: Name | None = Field(default=None, description="the team it belongs to")
    priority: Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None,
        description="how soon its requests go on where others wait, here by share and in vLLM by its scheduling priority; lower is sooner",
    )
    labels: dict[Name, Text] = Field(default={}, description='words for its usage records, e.g. {cost_center: "17"}')

    def expired(self, now: datetime) -> bool:
        """Whether it is refused at the aware datetime ``now``."""
        return self.expires is not None and self.expires <= now


class Team(Section):
    """Keys that share limits."""

    id: Name = Field(description="name of the team")
    limits: Limits | None = Field(default=None, description="how much its keys may use together")


class Claims(Section):
    """Which claims of a token say what; a name with dots leads into a claim, e.g. realm_access.roles."""

    subject: Name = Field(default="sub", description="whose token it is; each has the limits of its key's entry for itself")
    key: Name | None = Field(default=None, description="the key's entry, one of `keys`; needed where there are several")
    team: Name | None = Field(default=None, description="its team: an id, or a list of which the first that is in `teams` counts")
    models: Name | None = Field(default=None, description="models it may use, of those of its entry: a list, or words in one text")
    priority: Name | None = Field(default=None, description="its priority, a whole number, in the place of its entry's")


Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # none that is symmetric: who can check such a token can make one


class Jwt(Section):
    """An identity provider whose tokens (JSON Web Tokens) are taken as keys."""

    issuer: Text = Field(description="the issuer as its tokens name it in `iss`")
    audience: Texts = Field(description="what its tokens must name in `aud`, or a list of which they must name one")
    jwks: KeySet = Field(description="its public keys: a URL, or a file")
    ca: ReadableFile | None = Field(default=None, description="file with the authorities that the URL's certificate may be of, PEM")
    refresh: Duration = _quantity("10m", "time between two looks at the URL")
    keys: Texts = Field(description="the entries of `keys` as which its tokens count, one or a list")
    claims: Claims = Field(default=Claims(), description="which claims say what")
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = Field(
        default=("RS256", "ES256", "EdDSA"), description="how its tokens may be signed"
    )
    leeway: DurationOrZero = _quantity("30s", "how far the clocks of issuer and gateway may differ")
    token_limit: Size = _quantity("8KiB", "largest token")
    subjects: Annotated[int, Strict(), Field(ge=1, le=100_000)] = Field(
        default=10_000, description="subjects that each worker counts apart; further ones share the limits of their entry"
    )

    @field_validator("issuer")
    @classmethod
    def _can_be_checked(cls, issuer: str) -> str:
        if not installed("jwt", "cryptography"):
            raise ValueError("tokens need packages that are not installed: the extra `jwt` (in a clone: pip install '.[jwt]')")
        return issuer


class LimitsSection(Section):
    """How limits behave."""

    on_store_failure: Literal["allow", "refuse"] = Field(
        default="allow", description="what to do with requests while the limits' store cannot be reached"
    )


class PrefixCacheIsolation(Section):
    """Keys do not share vLLM's prefix cache: nobody can probe what others asked."""

    secret: Secret = Field(description="from which each key's cache salt is derived")


LogLevel = Literal["debug", "info", "warning", "error"]


class Log(Section):
    """What is written to standard error, and to the access log on standard output."""

    level: LogLevel = Field(default="info", description="least level that is written")
    levels: dict[LogPart, LogLevel] = Field(
        default={}, description=f"other levels for parts of the gateway, e.g. {{fleet: debug}}; the parts are {', '.join(PARTS)}"
    )
    format: Literal["text", "json"] = Field(default="text", description="lines for people or for machines")
    user: Flag = Field(default=False, description="put a request's `user` into its line of the access log")
    sample: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(
        default=0.0,
        description="share of requests whose line in the access log has the shape of the body: names and sizes, no text; 0 to 1",
    )


class Tracing(Section):
    """Where spans go, by OTLP over HTTP."""

    endpoint: HttpUrl = Field(description="base URL of the collector, e.g. http://otel-collector:4318")
    sample: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(default=1.0, description="share of requests that are traced, 0 to 1")

    @field_validator("endpoint")
    @classmethod
    def _can_be_exported(cls, endpoint: str) -> str:
        if not installed("opentelemetry.exporter.otlp.proto.http"):
            raise ValueError("tracing needs packages that are not installed: the extra `otel` (in a clone: pip install '.[otel]')")
        return endpoint


class Ledger(Section):
    """Usage that can be billed: a row for each request. A URL alone is short for `{url: …}`."""

    url: LedgerStore = Field(description="the database: sqlite:///FILE, relative to this file, or postgresql://USER@HOST/NAME")
    retention: Duration | None = Field(default=None, description="rows older than this are deleted; default: none is")
    user: Flag = Field(default=False, description="keep a request's `user`")
    metadata: Flag = Field(default=False, description="keep a request's `metadata`")


def _ledger(value: object, info: ValidationInfo) -> object:
    """The URL alone, or the place of a secret that is one."""
    alone = isinstance(value, str) or (isinstance(value, dict) and value.keys() <= {"env", "file"})
    return {"url": ledger_store(value, info)} if alone else value


class KeysFile(Section):
    """A file of keys alone, e.g. a mounted Secret."""

    keys: tuple[Key, ...] = Field(default=(), description="who may use the gateway")


class Config(Section):
    """The configuration of vllm-gateway."""

    server: ServerSection = Field(default=ServerSection(), description="the gateway's own ports and bounds")
    models: tuple[Model, ...] = Field(default=(), description="what is served")
    default_model: Name | None = Field(
        default=None, description="the model for requests that name none; default: the only model that the key may use"
    )
    groups: tuple[Group, ...] = Field(default=(), description="launched models of which only so many run at once")
    keys: tuple[Key, ...] = Field(default=(), description="who may use it; after loading also those of keys_file")
    keys_file: FilePath | None = Field(default=None, description="a file with more keys, e.g. a mounted Secret")
    teams: tuple[Team, ...] = Field(default=(), description="keys that share limits")
    jwt: tuple[Jwt, ...] = Field(default=(), description="identity providers whose tokens are taken as keys")
    limits: LimitsSection = Field(default=LimitsSection(), description="how limits behave")
    limits_store: LimitsStore = Field(
        default=None, description="where limits are counted: redis://… for several gateways together; default: memory"
    )
    ledger: Annotated[Ledger, BeforeValidator(_ledger, json_schema_input_type=LedgerStore | Ledger)] | None = Field(
        default=None, description="usage that can be billed: a URL, or its section; default: none is kept"
    )
    isolate_prefix_cache: PrefixCacheIsolation | None = Field(default=None, description="keep keys apart in vLLM's prefix cache")
    log: Log = Field(default=Log(), description="what is written to standard error")
    tracing: Tracing | None = Field(default=None, description="where spans go")

    _files: tuple[Path, ...] = PrivateAttr(())
    _withheld: frozenset[str] = PrivateAttr(frozenset())

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that this configuration was made from, absolute: those to watch for changes."""
        return self._files

    @property
    def withheld(self) -> frozenset[str]:
        """The variables of the environment that hold the gateway's own secrets, and no launched server's."""
        return self._withheld


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is in the scope ``pattern``, in which ``*`` stands for anything, slashes too."""
    return fnmatchcase(name, pattern)


def plain_variables(variables: dict[str, str | SecretStr]) -> dict[str, str]:
    """Environment variables with their secrets laid open, for the process that gets them."""
    return {name: value if isinstance(value, str) else value.get_secret_value() for name, value in variables.items()}
