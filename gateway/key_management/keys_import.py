"""Import keys of another gateway as entries of this configuration. Pure, from the text of a file.

Supported are lines of text (a key, ``id,key``, or ``key,id`` after a header that says so) and LiteLLM's list of keys as JSON
(``litellm``). The rules: the result contains only hashes. No id and no message contains a key. A line that is ambiguous, or too weak to
be a key, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.auth import keys
from gateway.config.values import HASH_PATTERN
from gateway.key_management import litellm

SHORTEST = 16
"""Minimum length of a plain key: a shorter text can be guessed, or is not a key."""
_KEY_NAMES = frozenset({"key", "api_key", "apikey", "token"})
_ID_NAMES = frozenset({"id", "key_id", "key_alias", "alias", "name"})
_WRITTEN_HASH = re.compile(HASH_PATTERN)
_EXPECTED = "expected a key, or id,key"


class BadLineError(Exception):
    """The file contains something that is not a key, or cannot be imported; the text says where."""


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """A key of the file. ``place``: where it is; ``entry``: ``id``, ``hash`` and other fields.

    ``left_out``: descriptions of restrictions in the other gateway that do not exist here.
    """

    position: str
    entry: Mapping[str, Any]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """The keys of a file: the new ones, each once; the number of keys that are already configured; and a text for each duplicate."""

    fresh: Sequence[ImportedKey]
    known: int
    again: Sequence[str]


def read_keys(text: str) -> list[ImportedKey]:
    """Read the keys in a file's text. Raises BadLineError."""
    imported = list(_litellm_keys(text) if text.lstrip()[:1] in ("{", "[") else _lines(text))
    for one in imported:
        if has_key_shape(str(one.entry["id"])):
            raise BadLineError(f"{one.position}: the id looks like a key; {_EXPECTED}, or a first line key,id")
    return imported


def without_unknown_teams(listed: Sequence[ImportedKey], teams: Collection[str]) -> list[ImportedKey]:
    """Return the keys without teams that the configuration does not have."""
    return [one if one.entry.get("team", "") in ("", *teams) else _without_team(one) for one in listed]


def _without_team(one: ImportedKey) -> ImportedKey:
    entry = {name: value for name, value in one.entry.items() if name != "team"}
    return ImportedKey(one.position, entry, (*one.left_out, "team_id (the configuration has no such team)"))


def sort_keys(listed: Sequence[ImportedKey], hashes: Collection[str], ids: Collection[str]) -> SortedKeys:
    """Select the keys to add to a configuration with these hashes and ids. Raises BadLineError."""
    by_hash: dict[str, ImportedKey] = {}
    again: list[str] = []
    for one in listed:
        first = by_hash.setdefault(one.entry["hash"], one)
        if first is not one:
            if first.entry != one.entry:
                raise BadLineError(f"{one.position} has the key of {first.position}, with other values")
            again.append(f"{one.position} is {first.position} again")
    fresh = [one for digest, one in by_hash.items() if digest not in hashes]
    _one_id_each(fresh, ids)
    return SortedKeys(fresh, len(by_hash) - len(fresh), again)


def _one_id_each(fresh: Sequence[ImportedKey], ids: Collection[str]) -> None:
    positions: dict[str, str] = {}
    for one in fresh:
        identity = str(one.entry["id"])
        if identity in ids:
            raise BadLineError(f"{one.position}: the configuration has another key with this id")
        if identity in positions:
            raise BadLineError(f"{one.position}: {positions[identity]} has this id with another key")
        positions[identity] = one.position


def has_key_shape(text: str) -> bool:
    """Check whether a text is a key, or a key's hash, rather than a name."""
    return text.lower().startswith("sk-") or keys.has_key_format(text) or _WRITTEN_HASH.fullmatch(text) is not None


# Lines


def _lines(text: str) -> Iterator[ImportedKey]:
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    rows = [(f"line {number}", _fields(line)) for number, line in lines if line and not line.startswith("#")]
    order = _header(*rows[0]) if rows else None
    for position, fields in rows[0 if order is None else 1 :]:
        if len(fields) > 2:
            raise BadLineError(f"{position} has more than one comma: {_EXPECTED}")
        identity, token = ("", fields[0]) if len(fields) == 1 else fields if order is None else order(fields)
        digest = _hash_in(position, token)
        yield ImportedKey(position, {"id": identity or _generated_id(digest), "hash": digest})


def _fields(line: str) -> list[str]:
    return [part.strip().strip("\"'") for part in line.split(",")]


def _header(position: str, fields: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str]] | None:
    """Return a function that puts the fields of a line in the order id, key; None if the first line is not a header.

    Raises BadLineError.
    """
    names = [field.lower() for field in fields]
    if not (_KEY_NAMES | _ID_NAMES).intersection(names):
        return None
    match names:
        case [key] if key in _KEY_NAMES:
            return tuple
        case [identity, key] if identity in _ID_NAMES and key in _KEY_NAMES:
            return tuple
        case [key, identity] if identity in _ID_NAMES and key in _KEY_NAMES:
            return lambda line: line[::-1]
    raise BadLineError(f"{position} is an unknown header: expected key, or id,key, or key,id")


def _hash_in(position: str, token: str) -> str:
    """Return the hash of a key, or the given hash. Raises BadLineError."""
    if _WRITTEN_HASH.fullmatch(token):
        return token.lower()
    if not keys.is_usable(token):
        raise BadLineError(f"{position} is not a key: {_EXPECTED}, of {SHORTEST} to 512 visible characters")
    if len(token) < SHORTEST:
        raise BadLineError(f"{position}: the key has fewer than {SHORTEST} characters; {_EXPECTED}")
    if _is_plain(token):
        raise BadLineError(f"{position}: the key consists of plain words, which can be guessed; {_EXPECTED}")
    return keys.hash_of(token)


def _is_plain(token: str) -> bool:
    """Check whether a text consists of words: no digit, and letters of one case or capitalized words. A random key almost never does."""
    return not any(map(str.isdigit, token)) and (token.islower() or token.isupper() or token.istitle())


def _generated_id(digest: str) -> str:
    return f"imported-{digest.removeprefix('sha256:')[:8]}"


# LiteLLM's list


def _litellm_keys(text: str) -> Iterator[ImportedKey]:
    try:
        for number, one in enumerate(litellm.keys_of(text), 1):
            position = _position(number, one.alias)
            identity = one.alias and "-".join(one.alias.split())
            also = () if identity == one.alias else ("the spaces of its key_alias",)
            yield ImportedKey(position, {"id": identity or _generated_id(one.hash), "hash": one.hash, **one.more}, (*also, *one.left_out))
    except litellm.FormatError as error:
        raise BadLineError(str(error)) from None


def _position(number: int, alias: str | None) -> str:
    named = alias and alias.isprintable() and not has_key_shape(alias)
    return f"key {number} ({alias})" if named else f"key {number}"
