"""Entries of the store, and their JSON. Pure.

The rule: the JSON of an entry is what the configuration accepts as an entry of ``keys`` or ``teams``. A key may have a ``name`` for people
in addition. The configuration's classes validate it, when it is written and when it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.access.actor import PersonId
from gateway.config import Key, Team
from gateway.key_management.key_list import last_expiry

Kind = Literal["key", "team"]
Holder = tuple[Kind, str]
"""The kind and the ID of a key or team, of the store or of the YAML."""
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class Row(NamedTuple):
    """An entry as it is stored. ``entry`` is its JSON. Times are aware. ``made_by``: the person who created a key for themselves."""

    id: str
    version: int
    entry: str
    created: datetime
    changed: datetime
    made_by: PersonId | None = None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key. ``name`` is a text for people. ``version`` is the number of its last change.

    ``made_by`` is the person who created it for themselves, None for the keys of operators.
    """

    key: Key
    name: str | None
    version: int
    created: datetime
    changed: datetime
    made_by: PersonId | None = None


@dataclass(frozen=True, slots=True)
class StoredTeam:
    """A team. ``version`` is the number of its last change."""

    team: Team
    version: int
    created: datetime
    changed: datetime


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A request with an Idempotency-Key. ``request`` is the digest of everything that the request says."""

    idempotency_key: str
    request: str

    @classmethod
    def of(cls, key: str | None, method: str, path: str, body: bytes, person: PersonId | None = None) -> Repeatable | None:
        """Return what makes a request repeatable; None without the header. Raises ValueError with a message for the client.

        Each person has separate keys, so that no person can find out those of another.
        """
        if key is None:
            return None
        if not _IDEMPOTENCY_KEY.fullmatch(key):
            raise ValueError("Idempotency-Key: expected 1 to 255 visible characters")
        return cls("\n".join((*(person or ()), key)), sha256(f"{method} {path}\n".encode() + body).hexdigest())


class Position(NamedTuple):
    """A row of the change log: its number, and a random text that tells it from a row of a database that was restored since.

    The default is the position before the first row.
    """

    seq: int = 0
    mark: str = ""


def key_json(key: Key, name: str | None) -> str:
    """Return the JSON of a key."""
    return json.dumps(document(key) | ({} if name is None else {"name": name}))


def team_json(team: Team) -> str:
    """Return the JSON of a team."""
    return json.dumps(document(team))


def document(entry: Key | Team) -> dict[str, Any]:
    """Return an entry as the configuration writes it, without defaults."""
    return entry.model_dump(mode="json", by_alias=True, exclude_defaults=True, warnings=False)  # the text of a time is no mistake


def parse_key(entry: str) -> tuple[Key, str | None]:
    """Return a key and its name from JSON. Raises ValueError."""
    fields: dict[str, Any] = json.loads(entry)
    name = fields.pop("name", None)
    return Key.model_validate(fields), name


def parse_team(entry: str) -> Team:
    """Return a team from JSON. Raises ValueError."""
    return Team.model_validate_json(entry)


class KeySummary(NamedTuple):
    """The hashes of a key, its team, and when its last hash expires, in seconds since the epoch. None: never, or it is revoked."""

    hashes: tuple[str, ...]
    team: str | None = None
    expires: float | None = None


def key_summary(entry: str) -> KeySummary:
    """Return the summary of a key's JSON, without validating the rest. Raises ValueError."""
    try:
        shape = _decode_shape(entry)
        if shape.expires is None and len(shape.hash) == 1 and isinstance(shape.hash[0], str):  # as most of many keys
            return KeySummary((shape.hash[0],), shape.team)
        hashes = tuple([one if isinstance(one, str) else one["hash"] for one in shape.hash])
        return KeySummary(hashes, shape.team, None if shape.revoked else _last_expiry(shape))
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise ValueError("the entry is invalid") from error


def hashes_and_team(entry: str) -> tuple[tuple[str, ...], str | None]:
    """Return the hashes of a key's JSON, and its team, without validating the rest. Raises ValueError."""
    return key_summary(entry)[:2]


def _last_expiry(shape: _Shape) -> float | None:
    """Return when the last hash expires, as ``key_list.expiry`` does for a validated key."""
    return last_expiry(_seconds(shape.expires), [None if isinstance(one, str) else _seconds(one.get("expires")) for one in shape.hash])


def _seconds(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()


class _Shape(msgspec.Struct):
    hash: list[str | dict[str, str]]
    team: str | None = None
    expires: str | None = None
    revoked: bool = False


_decode_shape = msgspec.json.Decoder(_Shape).decode


def stored_key(row: Row) -> StoredKey:
    """Return the key of a row. Raises ValueError."""
    key, name = parse_key(row.entry)
    return StoredKey(key, name, row.version, row.created, row.changed, row.made_by)


def stored_team(row: Row) -> StoredTeam:
    """Return the team of a row. Raises ValueError."""
    return StoredTeam(parse_team(row.entry), row.version, row.created, row.changed)


def merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with a JSON merge patch applied (RFC 7396): null removes a field, an object changes its fields."""
    after = {name: value for name, value in before.items() if name not in patch}
    for name, value in patch.items():
        if isinstance(value, dict):
            inner = before.get(name)
            after[name] = merged(inner if isinstance(inner, dict) else {}, value)
        elif value is not None:
            after[name] = value
    return after
