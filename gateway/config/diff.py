"""What is different between two configurations: in words for the operator, and what of it has to wait for a restart. Pure.

The rule: words name settings and ids, and of values only those of the gateway's own ports; a secret is never among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, ne
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel

from gateway.config import Config


def _is_switched(before: object, after: object) -> bool:
    return (before is None) != (after is None)


NEEDS_RESTART: Mapping[str, Callable[[object, object], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("server.host", "server.port", "server.workers"), ne),
        "server.tls": _is_switched,  # other certificates are taken by the workers themselves
        **dict.fromkeys(("server.admin", "ledger"), ne),
    }
)
"""What is decided when the gateway starts (its ports, how many processes there are, what they are given), and which change of it counts."""
S = TypeVar("S", bound=BaseModel)
_NAMED = 5
_ENTRIES = {"models": "model", "keys": "key", "groups": "group", "teams": "team"}


def pinned(running: Config, read: Config) -> Config:
    """What can be served of a configuration that was read: all but what needs a restart, which stays as it is."""
    for path, differs in NEEDS_RESTART.items():
        kept = attrgetter(path)(running)
        if differs(kept, attrgetter(path)(read)):
            read = _with(read, path.split("."), kept)
    return read


def _with(section: S, path: list[str], value: object) -> S:
    """The section with another value at a place in it."""
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})


def waiting(running: Config, read: Config) -> tuple[str, ...]:
    """What of a configuration that was read needs a restart, a sentence each."""
    values = ((path, attrgetter(path)(running), attrgetter(path)(read)) for path in NEEDS_RESTART)
    return tuple(_needs_restart(path, before, after) for path, before, after in values if NEEDS_RESTART[path](before, after))


def _needs_restart(path: str, before: object, after: object) -> str:
    values = f" ({after} in the file, {before} in use)" if isinstance(after, str | int) else ""
    return f"{path} needs a restart{values}"


def is_none(before: Config, after: Config) -> bool:
    """Whether the two say the same, in the same order."""
    return not _differing(before, after)


def between(before: Config, after: Config) -> tuple[str, ...]:
    """What has changed, a sentence each; nothing where the two say the same."""
    return tuple(_between(before, after))


def _between(before: Config, after: Config) -> Iterator[str]:
    for name, word in _ENTRIES.items():
        yield from _entries(word, _by_id(getattr(before, name)), _by_id(getattr(after, name)))
    for name in _differing(before, after):
        if name not in _ENTRIES:
            yield f"{name} has changed{_inside(getattr(before, name), getattr(after, name))}"


def _entries(word: str, before: Mapping[str, BaseModel], after: Mapping[str, BaseModel]) -> Iterator[str]:
    yield from _listed(word, "is new", "are new", [one for one in after if one not in before])
    yield from _listed(word, "is gone", "are gone", [one for one in before if one not in after])
    changed = [one for one in after if one in before and before[one] != after[one]]
    if word == "model":
        yield from (f"model {one} has changed{_inside(before[one], after[one])}" for one in changed)
    else:
        yield from _listed(word, "has changed", "have changed", changed)


def _listed(word: str, one: str, many: str, ids: list[str]) -> Iterator[str]:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    if len(ids) == 1:
        yield f"{word} {ids[0]} {one}"
    elif ids:
        yield f"{word}s {', '.join(ids[:_NAMED])}{more} {many}"


def _by_id(entries: Iterable[Any]) -> dict[str, BaseModel]:
    return {entry.id: entry for entry in entries}


def _inside(before: object, after: object) -> str:
    """The settings of a section that differ."""
    if not (isinstance(before, BaseModel) and isinstance(after, BaseModel)):
        return ""
    return f": {', '.join(_differing(before, after))}"


def _differing(before: BaseModel, after: BaseModel) -> list[str]:
    fields = type(after).model_fields
    return [fields[name].alias or name for name in fields if getattr(before, name) != getattr(after, name)]
