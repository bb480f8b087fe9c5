"""The types of single settings, with their limits and error messages.

Messages say what is expected. They do not repeat text of the file, because a key or a password may be in the wrong place.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from importlib.util import find_spec
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    Strict,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core.core_schema import float_schema, literal_schema, no_info_after_validator_function, plain_serializer_function_ser_schema

from gateway.access.actor import Role
from gateway.api.media_urls import is_entry
from gateway.config.problems import did_you_mean
from gateway.config.secret import REFERENCE_SCHEMA, read_file, resolve, surroundings
from gateway.snapshot.money import NANO, nano_units
from gateway.system.addresses import parsed_address
from gateway.system.cpus import usable_cpus
from gateway.system.logs import PARTS
from upstream.balancing.policies import POLICIES
from upstream.http.address import Address
from upstream.vllm.presets import PRESETS

EVENTS_POLICY = "cost"
"""The balance policy that uses KV cache events, and the cached tokens that responses report."""
MAX_WORKERS = 256
TRACE_ID = "{trace_id}"
"""Stands for the ID in the address of a trace."""
HASH_PATTERN = r"^sha256:[0-9a-fA-F]{64}$"
_MOUNT_PATTERN = r"^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+$"
_OWN_PATHS = {"health", "v1", "v2", "rerank", "score", "classify", "pooling", "tokenize", "detokenize"}
_VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
_PORT_NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?$"
_HOST_PATTERN = r"^(?=.{1,253}$)([A-Za-z0-9_-]{1,63}\.)*(?![0-9]+$)[A-Za-z0-9_-]{1,63}$"
_EVERY_ADDRESS = frozenset({"all", "any", "public"})
_HEADER_PATTERN = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}$"  # a token of RFC 9110, section 5.6.2
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-goog-api-key"})
_RENAMED_PARTS = {"relay": "worker"}
"""Parts of the log that had another name in earlier versions, and their current names."""

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_ISSUER_ID_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,39}$"
_MAIL_PATTERN = r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9.-]{1,253}$"  # the ASCII addresses of HTML's input element
_OPTION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def _visible(value: str) -> str:
    if not value.isprintable() or " " in value:
        raise ValueError("must not contain spaces or control characters")
    return value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL")  # no system call and no text in PostgreSQL accepts one
    return value


def _server_url(value: str) -> str:
    try:
        Address.parse(value)
    except ValueError as error:
        # urlsplit's message for a bad port repeats the text, which may be a password
        text = "the port is not a number from 0 to 65535" if str(error).startswith("Port") else str(error)
        raise ValueError(f"{text}; expected e.g. http://10.0.0.5:8000") from None
    return value


def _http_url(value: str) -> str:
    if not re.match(r"https?://[^/?#@\s]+([/?#]|$)", value):
        raise ValueError("expected a URL such as http://otel-collector:4318")
    return value


def _trace_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s{}]+[/?#][\x21-\x7e]*", value) or TRACE_ID not in value:
        raise ValueError(f"expected a URL with {TRACE_ID}, such as https://jaeger.example.com/trace/{TRACE_ID}")
    return value


def _origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", value):
        raise ValueError("expected an origin such as https://app.example.com, with no path, or *")
    return value


def _browser_url(value: str) -> str:
    """Return an address as browsers send it in ``Origin``: in lowercase, without a slash and without the default port."""
    found = re.fullmatch(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?/?", value.lower())
    if found is None:
        raise ValueError("expected an address with no path such as https://llm.example.com or http://localhost:9090")
    scheme, host, port = found.groups()
    return f"{scheme}://{host}{'' if port in (None, _DEFAULT_PORTS[scheme]) else port}"


def _issuer_id(value: str) -> str:
    if not re.fullmatch(_ISSUER_ID_PATTERN, value) or value == "link":
        raise ValueError("expected an ID of lowercase letters, digits, - and _, at most 40, and not `link`, which means sign-in links")
    return value


def _header_name(value: str) -> str:
    if not re.fullmatch(_HEADER_PATTERN, value):
        raise ValueError("expected the name of a header such as X-OpenWebUI-User-Id")
    if value.lower() in _CREDENTIALS:
        raise ValueError("this header carries credentials, which the ledger must not store")
    return value.lower()


def _mail_address(value: str) -> str:
    if not re.fullmatch(_MAIL_PATTERN, value):
        raise ValueError("expected a mail address such as ops@example.com, without a display name")
    return value


def _media_host(value: str) -> str:
    if not is_entry(value):
        raise ValueError("expected a host such as images.example.com, *.example.com or 10.0.0.7:8080, or *")
    return value.lower()


def _mount(value: str) -> str:
    if not re.fullmatch(_MOUNT_PATTERN, value):
        raise ValueError("expected a path such as /team/model, without a trailing slash, of letters, digits and . _ ~ -")
    if value.split("/")[1] in _OWN_PATHS:
        raise ValueError("the first part is reserved for the gateway's own routes; choose another")
    return value


def worker_count(value: object) -> object:
    """Return the number of workers for ``auto``, and other values unchanged."""
    return min(usable_cpus(), MAX_WORKERS) if value == "auto" else value


def _workers(value: object) -> object:
    if isinstance(value, str) and value != "auto":
        raise ValueError("expected a whole number or auto")
    return worker_count(value)


def _count_or_auto(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63):
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str | dict) else value


def one_text_or_many(value: object) -> object:
    """Return a list of texts, which may be written as a single text."""
    return [value] if isinstance(value, str) else value


def money(*, most: float, least: float | None = None, above: float | None = None) -> GetPydanticSchema:
    """Return the type of an amount in units of the currency within bounds. Its value is in whole nano-units.

    An amount of the configuration has so few digits that its text is exact when it is written again.
    """
    number = float_schema(strict=True, ge=least, gt=above, le=most, allow_inf_nan=False)
    in_units = plain_serializer_function_ser_schema(lambda nano: nano / NANO)
    amount = no_info_after_validator_function(nano_units, number, serialization=in_units)
    return GetPydanticSchema(lambda _source, _handler: amount)


Balance = Annotated[str, GetPydanticSchema(lambda _source, _handler: literal_schema(list(POLICIES)))]
"""The name of a balance policy."""


@dataclass(frozen=True, slots=True)
class KeyHash:
    """The hash of one key, ``sha256:`` and lowercase digits. The key is refused from ``expires`` on."""

    text: str
    expires: datetime | None = None


def _hash(value: object) -> KeyHash:
    if not isinstance(value, dict):
        return KeyHash(_hash_text(value))
    if not set(value) <= {"hash", "expires"} or "hash" not in value:
        raise ValueError("expected a hash, or {hash: sha256:…, expires: 2027-01-01}")
    return KeyHash(_hash_text(value["hash"]), _instant(value["expires"]) if value.get("expires") is not None else None)


def _written_hash(one: KeyHash) -> str | dict[str, Any]:
    return one.text if one.expires is None else {"hash": one.text, "expires": one.expires}


def _hash_text(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(HASH_PATTERN, value):
        raise ValueError("expected sha256: and 64 hexadecimal digits, as `vllm-gateway keys hash` prints; never the key itself")
    return value.lower()


def _instant(value: object) -> datetime:
    if isinstance(value, str):
        with suppress(ValueError):  # the text is reported below
            value = datetime.fromisoformat(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        raise ValueError("expected a date such as 2027-01-01 or a time such as 2027-01-01T12:00:00Z")  # noqa: TRY004  pydantic collects ValueError
    made = value if value.tzinfo else value.replace(tzinfo=UTC)
    try:
        made.astimezone(UTC)
    except OverflowError:
        raise ValueError("expected a time within the years 1 to 9999 in UTC") from None
    return made


def _log_part(value: str) -> str:
    if value in _RENAMED_PARTS:
        raise ValueError(f"this part was renamed; write `{_RENAMED_PARTS[value]}`")
    if value not in PARTS:
        raise ValueError(f"there is no such part of the gateway{did_you_mean(value, PARTS)}; the parts are {', '.join(PARTS)}")
    return value


def _network(value: object) -> IPv4Network | IPv6Network:
    text = value if isinstance(value, str) else ""
    try:
        return ip_network(text)
    except ValueError:
        raise ValueError(f"expected an address or network such as 10.0.0.0/8{_network_around(text)}") from None


def _network_around(text: str) -> str:
    """Return the network that contains an address with a prefix length, such as 10.0.0.5/8, as a hint."""
    try:
        return f"; write {ip_network(text, strict=False)} for the whole network, or {text.partition('/')[0]} for one address"
    except ValueError:
        return ""


def _listen_host(value: str) -> str:
    if parsed_address(value) is None and (value in _EVERY_ADDRESS or not re.fullmatch(_HOST_PATTERN, value)):
        raise ValueError("expected an address of this machine, e.g. 127.0.0.1; 0.0.0.0 is all IPv4 addresses, and :: is all addresses")
    return value


def _named_port(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and re.fullmatch(_PORT_NAME_PATTERN, value):
        return value
    raise ValueError("expected the number of a port, 1 to 65535, or its name")


def _path(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError("expected the path of a file")
    return surroundings(info).file(value)


def _written_file(value: object, info: ValidationInfo) -> Path:
    """Return the path of a file that the gateway itself writes. It is not watched, because each line would be a change."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected the path of a file")
    return Path(os.path.abspath(surroundings(info).folder / value))


def _readable_file(value: object, info: ValidationInfo) -> Path:
    path = _path(value, info)
    read_file(str(path), surroundings(info))
    return path


@dataclass(frozen=True, slots=True)
class KeySetSource:
    """The source of an issuer's JWKS: a URL, or a file whose usable keys are ``keys`` (see ``auth.jwks``)."""

    url: str | None = None
    keys: bytes | None = None


def _key_set_source(value: object, info: ValidationInfo) -> KeySetSource:
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return KeySetSource(url=_http_url(value))
    path = _path(value, info)
    text = read_file(str(path), surroundings(info))
    if not installed("jwt", "cryptography"):
        return KeySetSource()  # the check of `issuer` reports what is missing
    from gateway.auth.jwks import KeySetError, verification_keys  # loaded only where tokens are configured

    try:
        return KeySetSource(keys=verification_keys(text.encode()))
    except KeySetError as error:
        raise ValueError(f"the file {path} {error}") from None


def installed(*modules: str) -> bool:
    """Return whether optional packages are installed."""
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # its parent package is missing
        return False


_RECORD_KEY = 32  # bytes, for AES-256


def record_key(text: str) -> bytes:
    """Return the encryption key of a text in base64. Raises ValueError."""
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != _RECORD_KEY:
        raise ValueError(f"the key is not base64 of {_RECORD_KEY} bytes; create one with `openssl rand -base64 {_RECORD_KEY}`")
    return key


def needs_extra(what: str, extra: str) -> str:
    """Return the message for a setting whose packages are not installed. ``what`` begins it."""
    return f"{what} packages that are not installed: the extra `{extra}` (pip install 'vllm-gateway[{extra}]')"


def requires(what: str, extra: str, *modules: str) -> AfterValidator:
    """Return a check that the packages of an extra are installed. ``what`` begins the message."""

    def check(value: str) -> str:
        if not installed(*modules):
            raise ValueError(needs_extra(what, extra))
        return value

    return AfterValidator(check)


def kv_events_installed() -> bool:
    """Return whether the packages of the extra ``kv-events`` are installed."""
    return installed("zmq")


def _weights_source(value: str, info: ValidationInfo) -> str:
    path = os.path.abspath(surroundings(info).folder / value)
    return path if value.startswith(("./", "../")) or exists(Path(path)) else value


def exists(path: Path) -> bool:
    """Return whether a path exists. False for a path that no system call accepts."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _json(value: object) -> Any:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _json(part)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has at most 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has no infinite numbers and no NaN")
    elif isinstance(value, date):
        raise ValueError("JSON has no dates; write it in quotes")
    return value


def _body_fields(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a mapping, e.g. {temperature: 0.7}")  # noqa: TRY004
    if "model" in value:
        raise ValueError("`model` is set by the request and cannot be set here")
    _json(value)
    return value


def _option(value: str) -> str:
    if value.startswith("-"):
        raise ValueError("write the option without its dashes")
    if not re.fullmatch(_OPTION_PATTERN, value):
        raise ValueError("this is not an option name")
    return value


def _option_value(value: object) -> Any:
    if value is None:
        raise ValueError("has no value; write true for an option without a value")
    return _json(value)


def _preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"there is no such preset{did_you_mean(value, PRESETS)}; the presets are {', '.join(PRESETS)}")
    return value


def _variable(value: object, info: ValidationInfo) -> str | SecretStr:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        surroundings(info).shared.add(str(value.get("env")))
        return resolve(value, info)
    raise ValueError("expected text: write the value in quotes")


Text = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_without_nul)]
_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_TEXTS_SCHEMA: dict[str, Any] = {"oneOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}]}
Texts = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(one_text_or_many), WithJsonSchema(_TEXTS_SCHEMA)]
"""A text, or a list of texts."""

WeightsSource = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_weights_source)]
"""A name on the hub or a folder. A value that starts with ./ or ../, or that exists, is a folder relative to the configuration."""

Preset = Annotated[str, Strict(), AfterValidator(_preset), WithJsonSchema({"type": "string", "enum": list(PRESETS)})]
"""The name of a model family with known parsers."""

Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, lt=2**63)]
CountOrAuto = Annotated[
    int | Literal["auto"],
    PlainValidator(_count_or_auto),
    WithJsonSchema({"oneOf": [{"type": "integer", "minimum": 1, "exclusiveMaximum": 2**63}, {"type": "string", "enum": ["auto"]}]}),
]
Port = Annotated[int, Strict(), Field(ge=0, le=65535)]
Name = Annotated[str, Strict(), Field(min_length=1, max_length=256), AfterValidator(_visible)]
"""An ID, an alias, or a pattern."""

ListenHost = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_listen_host)]
"""An address or host name on which the gateway listens."""

ServerUrl = Annotated[str, Strict(), AfterValidator(_server_url)]
HttpUrl = Annotated[str, Strict(), AfterValidator(_http_url)]
TraceUrl = Annotated[str, Strict(), AfterValidator(_trace_url)]
Origin = Annotated[str, Strict(), AfterValidator(_origin)]
BrowserUrl = Annotated[str, Strict(), AfterValidator(_browser_url)]
"""The address of a port in browsers, without a path."""
IssuerId = Annotated[str, Strict(), AfterValidator(_issuer_id), Field(json_schema_extra={"pattern": _ISSUER_ID_PATTERN})]
MailAddress = Annotated[str, Strict(), AfterValidator(_mail_address), Field(json_schema_extra={"pattern": _MAIL_PATTERN})]
MailAddresses = Annotated[
    tuple[MailAddress, ...], Field(min_length=1, max_length=50), BeforeValidator(one_text_or_many), WithJsonSchema(_TEXTS_SCHEMA)
]
"""A mail address, or a list of them."""
MediaHost = Annotated[str, Strict(), AfterValidator(_media_host)]
Mount = Annotated[str, Strict(), AfterValidator(_mount), Field(json_schema_extra={"pattern": _MOUNT_PATTERN})]
_INSTANT_SCHEMA: dict[str, Any] = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}", "examples": ["2027-01-01"]}
Instant = Annotated[datetime, PlainValidator(_instant), WithJsonSchema(_INSTANT_SCHEMA)]
"""An aware datetime. A date means 00:00. Without a zone it is in UTC."""

_HASH_SCHEMA: dict[str, Any] = {"type": "string", "pattern": HASH_PATTERN}
_ENDING_HASH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"hash": _HASH_SCHEMA, "expires": _INSTANT_SCHEMA},
    "required": ["hash"],
    "additionalProperties": False,
}
_ONE_HASH_SCHEMA: list[dict[str, Any]] = [_HASH_SCHEMA, _ENDING_HASH_SCHEMA]
Hash = Annotated[KeyHash, PlainValidator(_hash), PlainSerializer(_written_hash), WithJsonSchema({"oneOf": _ONE_HASH_SCHEMA})]
Hashes = Annotated[
    tuple[Hash, ...],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"oneOf": [_HASH_SCHEMA, {"type": "array", "items": {"oneOf": _ONE_HASH_SCHEMA}}, _ENDING_HASH_SCHEMA]}),
]
"""The hash of a key, or a list of hashes. A hash with an expiry is a mapping."""

LogPart = Annotated[str, AfterValidator(_log_part)]
Network = Annotated[IPv4Network | IPv6Network, PlainValidator(_network), WithJsonSchema({"type": "string", "examples": ["10.0.0.0/8"]})]
NamedPort = Annotated[
    int | str,
    PlainValidator(_named_port),
    WithJsonSchema({"oneOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, {"type": "string", "pattern": _PORT_NAME_PATTERN}]}),
]
Workers = Annotated[
    int,
    Strict(),
    Field(ge=1, le=MAX_WORKERS),
    BeforeValidator(_workers),
    WithJsonSchema({"oneOf": [{"type": "integer", "minimum": 1, "maximum": MAX_WORKERS}, {"type": "string", "enum": ["auto"]}]}),
]
"""The number of workers. ``auto`` becomes the number of usable CPUs when the configuration is loaded."""

HeaderName = Annotated[str, Strict(), AfterValidator(_header_name), Field(json_schema_extra={"pattern": _HEADER_PATTERN})]
"""The name of a request header, in lowercase, that carries no credentials."""

FilePath = Annotated[Path, PlainValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]
"""An absolute path. A relative one starts from the folder of the configuration."""

WrittenFile = Annotated[Path, PlainValidator(_written_file), WithJsonSchema({"type": "string", "minLength": 1})]
"""An absolute path of a file that the gateway writes."""

ReadableFile = Annotated[Path, PlainValidator(_readable_file), WithJsonSchema({"type": "string", "minLength": 1})]
TokenHash = Annotated[str, PlainValidator(_hash_text), WithJsonSchema(_HASH_SCHEMA)]
"""The hash of an admin token, in lowercase."""

AdminRole = Annotated[Role, WithJsonSchema({"type": "string", "enum": [role.value for role in Role]})]

KeySet = Annotated[
    KeySetSource,
    PlainValidator(_key_set_source),
    WithJsonSchema({"type": "string", "minLength": 1, "examples": ["https://login.example.com/keys", "keys.json"]}),
]
"""A URL or a file."""

BodyFields = Annotated[dict[str, Any], PlainValidator(_body_fields), WithJsonSchema({"type": "object", "not": {"required": ["model"]}})]
"""Fields of a request body."""

Options = dict[
    Annotated[str, AfterValidator(_option)],
    Annotated[Any, PlainValidator(_option_value), WithJsonSchema({"type": ["string", "number", "boolean", "array", "object"]})],
]
"""Options of a command by name without dashes. Flags are true or false, a list repeats an option, a mapping is JSON."""

Variables = dict[
    Annotated[str, Field(pattern=_VARIABLE_PATTERN)],
    Annotated[str | SecretStr, PlainValidator(_variable), WithJsonSchema({"oneOf": [{"type": "string"}, *REFERENCE_SCHEMA["oneOf"]]})],
]
"""Environment variables. Secrets are references."""
