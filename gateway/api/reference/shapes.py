"""Read the shapes of bodies from the YAML files in this folder, as JSON Schema (2020-12).

The files use abbreviations: ``type: text|null`` is a string or null, ``$ref: Name`` is a schema of these files, and ``also: [name,
…]`` adds the properties of those entries of the file's ``shared`` after a schema's own. The rule: only ``read`` knows the
abbreviations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

Schema = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it
_FILES = ("generation.yaml", "messages.yaml", "others.yaml", "own_key.yaml")


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """The description of one route. ``request``, ``response`` and ``event`` are names of schemas; an event is part of a stream.

    ``query`` has the texts of its query parameters. ``more_statuses`` are the statuses of a GET route in addition to the common statuses.
    """

    id: str
    tag: str
    summary: str
    response: str
    about: str = ""
    request: str | None = None
    event: str | None = None
    example: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    more_statuses: Sequence[int] = ()


@dataclass(slots=True)
class Shapes:
    """All schemas by name, the routes that reach a server by path, and the GET routes."""

    schemas: dict[str, Schema] = field(default_factory=dict)
    routes: dict[str, RouteDescription] = field(default_factory=dict)
    gets: dict[str, RouteDescription] = field(default_factory=dict)


def read() -> Shapes:
    """Read all files."""
    shapes = Shapes()
    for name in _FILES:
        content = yaml.load((files(__package__) / name).read_text(encoding="utf-8"), _LOADER)  # noqa: S506  both are safe ones
        shapes.schemas |= {name: _schema(each, content["shared"]) for name, each in content["schemas"].items()}
        shapes.routes |= {path: RouteDescription(**each) for path, each in content["routes"].items()}
        shapes.gets |= {path: RouteDescription(**each) for path, each in content.get("gets", {}).items()}
    return shapes


def _schema(short: Any, shared: Mapping[str, Any]) -> Any:
    if isinstance(short, list):
        return [_schema(each, shared) for each in short]
    if not isinstance(short, dict):
        return short
    schema = {name: _keyword(name, value, shared) for name, value in short.items() if name not in ("also", "properties")}
    properties = dict(_properties(short, shared))
    return schema | ({"properties": properties} if properties else {})


def _keyword(name: str, value: Any, shared: Mapping[str, Any]) -> Any:
    if name == "type" and isinstance(value, str):
        types = value.replace("text", "string").split("|")
        return types if len(types) > 1 else types[0]
    if name == "$ref":
        return f"#/components/schemas/{value}"
    return value if name in ("enum", "required", "const") else _schema(value, shared)


def _properties(short: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield the properties: first the required, then the others of the schema, then the shared properties."""
    own = short.get("properties", {})
    added = {name: each for group in short.get("also", ()) for name, each in shared[group].items()}
    needed = short.get("required", ())
    every = added | own
    for name in dict.fromkeys((*(name for name in needed if name in every), *own, *added)):
        yield name, _schema(every[name], shared)
