"""Keys of another gateway, as entries of this one's configuration. Pure, from the text of a file.

Known are lines of text (a key, ``id,key``, or ``key,id`` below a header that says so) and LiteLLM's list of keys as JSON
(``litellm``). The rules: what comes out holds hashes alone; no id and no message is a key; what could be read in two ways,
or is too weak to be a key, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.auth import keys
from gateway.config.values import HASH_PATTERN
from gateway.key_management import litellm

SHORTEST = 16
"""Characters that a plain key has at least: a shorter one is guessed, or is something else."""
_KEY_NAMES = frozenset({"key", "api_key", "apikey", "token"})
_ID_NAMES = frozenset({"id", "key_id", "key_alias", "alias", "name"})
_WRITTEN_HASH = re.compile(HASH_PATTERN)
_EXPECTED = "expected a key, or id,key"


@dataclass(frozen=True, slots=True)
class BadLineError(Exception):
    """The file holds something that is no key, or cannot be taken over; the text says where."""

    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """A key of the file. ``place``: where it is; ``entry``: ``id``, ``hash`` and what else is known of it; ``left_out``: what the other
    gateway holds against it that has no place here, in words."""

    place: str
    entry: Mapping[str, Any]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """The keys of a file: those that are new, each once; how many are known; and, in words, which are there again."""

    fresh: Sequence[ImportedKey]
    known: int
    again: Sequence[str]


def read_keys(text: str) -> list[ImportedKey]:
    """The keys that a file's text holds. Raises BadLineError."""
    made = list(_listed(text) if text.lstrip()[:1] in ("{", "[") else _lines(text))
    for one in made:
        if looks_like_a_key(str(one.entry["id"])):
            raise BadLineError(f"{one.place}: the id looks like a key; {_EXPECTED}, or a first line that says key,id")
    return made


def without_unknown_teams(listed: Sequence[ImportedKey], teams: Collection[str]) -> list[ImportedKey]:
    """As they are, without the teams that a configuration with these has not."""
    return [one if one.entry.get("team", "") in ("", *teams) else _without_team(one) for one in listed]


def _without_team(one: ImportedKey) -> ImportedKey:
    entry = {name: value for name, value in one.entry.items() if name != "team"}
    return replace(one, entry=entry, left_out=(*one.left_out, "team_id (the configuration has no such team)"))


def sort_keys(listed: Sequence[ImportedKey], hashes: Collection[str], ids: Collection[str]) -> SortedKeys:
    """What of a file's keys is to be added to a configuration with these hashes and ids. Raises BadLineError."""
    by_hash: dict[str, ImportedKey] = {}
    again: list[str] = []
    for one in listed:
        first = by_hash.setdefault(one.entry["hash"], one)
        if first is not one:
            if first.entry != one.entry:
                raise BadLineError(f"{one.place} has the key of {first.place}, and says something else of it")
            again.append(f"{one.place} is {first.place} again")
    fresh = [one for digest, one in by_hash.items() if digest not in hashes]
    _one_id_each(fresh, ids)
    return SortedKeys(fresh, len(by_hash) - len(fresh), again)


def _one_id_each(fresh: Sequence[ImportedKey], ids: Collection[str]) -> None:
    places: dict[str, str] = {}
    for one in fresh:
        identity = str(one.entry["id"])
        if identity in ids:
            raise BadLineError(f"{one.place}: the configuration has another key with this id")
        if identity in places:
            raise BadLineError(f"{one.place}: {places[identity]} has this id, and another key")
        places[identity] = one.place


def looks_like_a_key(text: str) -> bool:
    """Whether a text is a key, or a key's hash, rather than a name."""
    return text.lower().startswith("sk-") or keys.has_key_format(text) or _WRITTEN_HASH.fullmatch(text) is not None


# Lines


def _lines(text: str) -> Iterator[ImportedKey]:
    rows = [(f"line {number}", _fields(line)) for number, line in enumerate(text.splitlines(), 1) if _says_something(line)]
    order = _header(*rows[0]) if rows else None
    for place, fields in rows[0 if order is None else 1 :]:
        if len(fields) > 2:
            raise BadLineError(f"{place} has more than one comma: {_EXPECTED}")
        identity, token = ("", fields[0]) if len(fields) == 1 else fields if order is None else order(fields)
        digest = _hash_in(place, token)
        yield ImportedKey(place, {"id": identity or _name(digest), "hash": digest})


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _fields(line: str) -> list[str]:
    return [part.strip().strip("\"'") for part in line.split(",")]


def _header(place: str, fields: Sequence[str]) -> Callable[[Sequence[str]], Sequence[str]] | None:
    """What brings a line into the order id, key; None where the first line is no header. Raises BadLineError for an unknown one."""
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
    raise BadLineError(f"{place} is a header that is not known: expected key, or id,key, or key,id")


def _hash_in(place: str, token: str) -> str:
    """A key's hash; of what is a hash already, that."""
    if _WRITTEN_HASH.fullmatch(token):
        return token.lower()
    if not keys.is_usable(token):
        raise BadLineError(f"{place} is no key: {_EXPECTED}, of {SHORTEST} to 512 visible characters")
    if len(token) < SHORTEST:
        raise BadLineError(f"{place}: what stands for the key has less than {SHORTEST} characters; {_EXPECTED}")
    if _is_plain(token):
        raise BadLineError(f"{place}: what stands for the key are plain words, which can be guessed; {_EXPECTED}")
    return keys.hash_of(token)


def _is_plain(token: str) -> bool:
    """No digit, and letters of one case, or words with capitals: at random, that hardly comes about."""
    return not any(map(str.isdigit, token)) and (token.islower() or token.isupper() or token.istitle())


def _name(digest: str) -> str:
    return f"imported-{digest.removeprefix('sha256:')[:8]}"


# LiteLLM's list


def _listed(text: str) -> Iterator[ImportedKey]:
    try:
        for number, one in enumerate(litellm.keys_of(text), 1):
            place = _place(number, one.alias)
            identity = one.alias and "-".join(one.alias.split())
            also = () if identity == one.alias else ("the spaces of its key_alias",)
            yield ImportedKey(place, {"id": identity or _name(one.hash), "hash": one.hash, **one.more}, (*also, *one.left_out))
    except litellm.FormatError as error:
        raise BadLineError(str(error)) from None


def _place(number: int, alias: str | None) -> str:
    named = alias and alias.isprintable() and not looks_like_a_key(alias)
    return f"key {number} ({alias})" if named else f"key {number}"
