"""The difference between two configurations: sentences for the operator, and the settings that need a restart. Pure.

The rule: sentences name settings and IDs. They contain no values except the gateway's own ports, so they never contain a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, ne
from typing import Any, TypeVar

from pydantic import BaseModel

from gateway.config import Config


def _is_switched(before: object, after: object) -> bool:
    return (before is None) != (after is None)


NEEDS_RESTART: Mapping[str, Callable[[object, object], bool]] = {
    **dict.fromkeys(("server.host", "server.port", "server.workers"), ne),
    **dict.fromkeys(("server.tls", "server.admin.tls"), _is_switched),  # changed certificates are read again
    **dict.fromkeys(("server.admin.host", "server.admin.port", "ledger", "store", "audit"), ne),
    "sign_in": _is_switched,  # its routes are made at the start, its settings are read for each sign-in
    "notices": lambda before, after: bool(before) != bool(after),  # their database is opened at the start
}
"""Settings that take effect only at the start (ports, number of processes, what these inherit), and whether two values differ."""
S = TypeVar("S", bound=BaseModel)
_MAX_NAMED = 5
_ENTRIES = {"models": "model", "keys": "key", "groups": "group", "teams": "team"}


def without_restart(running: Config, read: Config) -> Config:
    """Return the configuration that was read, with the running values of all settings that need a restart."""
    for path, differs in NEEDS_RESTART.items():
        present = attrgetter(path)(running)
        if differs(present, attrgetter(path)(read)):
            read = _with(read, path.split("."), present)
    return read


def _with(section: S, path: list[str], value: object) -> S:
    """Return a copy of a section with another value at a path."""
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})


def needs_restart(running: Config, read: Config) -> tuple[str, ...]:
    """Return a sentence for each changed setting that needs a restart."""
    sentences = []
    for path, differs in NEEDS_RESTART.items():
        before, after = attrgetter(path)(running), attrgetter(path)(read)
        if differs(before, after):
            values = f" ({after} in the file, {before} in use)" if isinstance(after, str | int) else ""
            sentences.append(f"{path} needs a restart{values}")
    return tuple(sentences)


def are_equal(before: Config, after: Config) -> bool:
    """Return whether two configurations are the same, including the order of their entries."""
    return not _differing(before, after)


def changes(before: Config, after: Config) -> tuple[str, ...]:
    """Return a sentence for each change."""
    return tuple(_changes(before, after))


def _changes(before: Config, after: Config) -> Iterator[str]:
    for name, noun in _ENTRIES.items():
        yield from _entries(noun, _by_id(getattr(before, name)), _by_id(getattr(after, name)))
    for name in _differing(before, after):
        if name not in _ENTRIES:
            yield f"{name} changed{_settings(getattr(before, name), getattr(after, name))}"


def _entries(noun: str, before: Mapping[str, BaseModel], after: Mapping[str, BaseModel]) -> Iterator[str]:
    yield from _listed(noun, "added", [identity for identity in after if identity not in before])
    yield from _listed(noun, "removed", [identity for identity in before if identity not in after])
    changed = [identity for identity in after if identity in before and before[identity] != after[identity]]
    if noun == "model":
        yield from (f"model {identity} changed{_settings(before[identity], after[identity])}" for identity in changed)
    else:
        yield from _listed(noun, "changed", changed)


def _listed(noun: str, verb: str, ids: list[str]) -> Iterator[str]:
    more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    if ids:
        yield f"{noun}{'s' if len(ids) > 1 else ''} {', '.join(ids[:_MAX_NAMED])}{more} {verb}"


def _by_id(entries: Iterable[Any]) -> dict[str, BaseModel]:
    return {entry.id: entry for entry in entries}


def _settings(before: object, after: object) -> str:
    """Name the settings of a section that differ."""
    if not (isinstance(before, BaseModel) and isinstance(after, BaseModel)):
        return ""
    return f": {', '.join(_differing(before, after))}"


def _differing(before: BaseModel, after: BaseModel) -> list[str]:
    fields = type(after).model_fields
    return [fields[name].alias or name for name in fields if getattr(before, name) != getattr(after, name)]
