"""Secrets: the configuration refers to them and never contains them.

``{env: NAME}`` or ``{file: PATH}`` is resolved while the configuration is loaded. The rule: no message repeats a value that was found
where a secret is expected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainValidator, SecretStr, ValidationInfo, WithJsonSchema

from gateway.config.database_url import database_url
from gateway.config.redis_url import SCHEMES, limits_store
from gateway.config.source import reason

MAX_SECRET_BYTES = 65_536
_HOW = "write {env: NAME} or {file: PATH}"


@dataclass(slots=True)
class Surroundings:
    """The environment to which a configuration refers, and the folder of its relative paths.

    ``files`` collects the files that were read, so that they can be watched. ``named`` are the environment variables that contain secrets,
    and ``shared`` those that launched servers get.
    """

    environ: Mapping[str, str]
    folder: Path
    files: list[Path]
    named: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)

    def file(self, path: str) -> Path:
        """Return the absolute path of a file, and add it to ``files``."""
        absolute = Path(os.path.abspath(self.folder / path))
        self.files.append(absolute)
        return absolute


def surroundings(info: ValidationInfo) -> Surroundings:
    """Return the environment and the folder of the validation, by default no variables and the working directory."""
    return info.context if isinstance(info.context, Surroundings) else Surroundings({}, Path(), [])


def resolve(value: object, info: ValidationInfo) -> SecretStr:
    """Return the secret behind ``{env: NAME}`` or ``{file: PATH}``. Raises ValueError with a message for the operator."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"secrets must not be in this file: {_HOW}")  # noqa: TRY004  pydantic collects ValueError
    if len(value) != 1 or not (set(value) <= {"env", "file"}) or not all(isinstance(v, str) and v for v in value.values()):
        raise ValueError(f"a secret has exactly one of env and file: {_HOW}")
    around = surroundings(info)
    text = _from_environment(value["env"], around) if "env" in value else _from_file(value["file"], around)
    if not text.isprintable():
        raise ValueError("the secret contains line breaks or other control characters")
    return SecretStr(text)


def _from_environment(name: str, around: Surroundings) -> str:
    around.named.add(name)
    if not (text := around.environ.get(name)):
        raise ValueError(f"the environment variable {name} is {'not set' if text is None else 'empty'}")
    return text


def _from_file(name: str, around: Surroundings) -> str:
    if not (text := read_file(name, around).strip("\r\n")):
        raise ValueError(f"the file {name} is empty")
    return text


def read_file(name: str, around: Surroundings) -> str:
    """Return the text of a small file. Raises ValueError with a message for the operator."""
    try:
        path = around.file(name)
        if path.exists() and not path.is_file():
            raise ValueError(f"{name} is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the file {name} cannot be read: {reason(error)}") from None
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"the file {name} is larger than {MAX_SECRET_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"the file {name} is not UTF-8 text") from None


def _no_memory(value: object) -> object:
    return None if value == "memory" else value


def _url_of(schemes: tuple[str, ...], example: str, understands: Callable[[str], object] | None = None) -> Any:
    def check(value: object, info: ValidationInfo) -> SecretStr:
        secret = SecretStr(value) if isinstance(value, str) else resolve(value, info)
        scheme, password = _scheme_and_password(secret.get_secret_value())
        if scheme not in schemes:
            raise ValueError(f"expected a URL such as {example}")
        if understands is not None:
            understands(secret.get_secret_value())
        if password and isinstance(value, str):
            raise ValueError(f"passwords must not be in this file: {_HOW} for the whole URL")
        return secret

    return check


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number up to 65535
        return False


def _scheme_and_password(url: str) -> tuple[str, str | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.password
    except ValueError:
        return "", None


REFERENCE_SCHEMA: dict[str, Any] = {
    "oneOf": [
        {"type": "object", "properties": {name: {"type": "string", "minLength": 1}}, "required": [name], "additionalProperties": False}
        for name in ("env", "file")
    ]
}


def _url_schema(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"oneOf": [{"type": "string", "pattern": pattern, "examples": [example]}, *REFERENCE_SCHEMA["oneOf"]]})


def _of_length(least: int, create: str) -> AfterValidator:
    """Return a check that a secret is too long to be guessed. ``create``: a command that prints one."""

    def check(secret: SecretStr) -> SecretStr:
        if len(secret.get_secret_value()) < least:
            raise ValueError(f"the secret has fewer than {least} characters; create one with `{create}`")
        return secret

    return AfterValidator(check)


Secret = Annotated[SecretStr, PlainValidator(resolve), WithJsonSchema(REFERENCE_SCHEMA)]
"""A secret that is resolved while the configuration is loaded."""
LongSecret = Annotated[Secret, _of_length(16, "openssl rand -hex 32")]
SessionKey = Annotated[Secret, _of_length(32, "openssl rand -base64 48")]

_REDIS, _SQLITE = "redis://localhost:6379/0", "sqlite:///usage.db"
LimitsStore = Annotated[
    Annotated[SecretStr, PlainValidator(_url_of(SCHEMES, _REDIS, limits_store))] | None,
    BeforeValidator(_no_memory),
    _url_schema(r"^(memory$|rediss?(\+sentinel)?:|unix:)", _REDIS),
]
"""The store in which several gateways count together.

None: they count in this gateway's memory. A URL with a password must be a reference to a secret.
"""

_ledger_url = _url_of(("sqlite", "postgresql"), f"{_SQLITE} or postgresql://user@host:5432/name")


def ledger_store(value: object, info: ValidationInfo) -> SecretStr:
    """Return the ledger's URL, resolved if it is a secret. Raises ValueError with a message for the operator."""
    secret: SecretStr = _ledger_url(value, info)
    scheme, _, path = secret.get_secret_value().partition("://")
    if scheme == "sqlite" and (not path.startswith("/") or not path.strip("/") or "?" in path):
        raise ValueError(f"expected a file after three slashes, as in {_SQLITE}")
    database_url(secret.get_secret_value())
    return secret


OF_LEDGER = "ledger"
"""The value of ``store`` for the ledger's database."""


def key_store(value: object, info: ValidationInfo) -> SecretStr:
    """Return the URL of the store of keys, or ``OF_LEDGER``. Raises ValueError with a message for the operator."""
    written = value.get_secret_value() if isinstance(value, SecretStr) else value
    return SecretStr(OF_LEDGER) if written == OF_LEDGER else ledger_store(value, info)


LedgerStore = Annotated[SecretStr, PlainValidator(ledger_store), _url_schema("^(sqlite|postgresql):", _SQLITE)]
"""The ledger's database. A URL with a password must be a reference to a secret."""


_WEBHOOK = "https://hooks.example.com/gateway"


def _webhook(text: str) -> None:
    if not _has_host(text) or not text.isascii() or " " in text:
        raise ValueError(f"expected a URL such as {_WEBHOOK}")


Webhook = Annotated[SecretStr, PlainValidator(_url_of(("http", "https"), _WEBHOOK, _webhook)), _url_schema("^https?:", _WEBHOOK)]
"""The URL of a webhook. It is treated as a secret: with many chat systems, the URL alone permits to post."""

KeyStore = Annotated[SecretStr, PlainValidator(key_store), _url_schema("^(ledger$|sqlite:|postgresql:)", OF_LEDGER)]
"""The database of keys and teams that are made at run time. A URL with a password must be a reference to a secret."""
