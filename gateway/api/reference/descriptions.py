"""Describe an OpenAPI document as text: its operations, and its schemas as rows of tables. Pure.

The rule: the text for a schema is decided here once; each writer decides the layout. A ``Ref`` in a row is the name of another
schema, which has its own table. Objects without a name get separate rows, by dotted paths.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]


class Ref(str):
    """The name of another schema."""

    __slots__ = ()

    @property
    def href(self) -> str:
        """The link to it within a page."""
        return f"#{self}"


@dataclass(frozen=True, slots=True)
class TableRow:
    """A field of an object. ``kind`` is its type; pieces that are a ``Ref`` are links."""

    name: str
    kind: tuple[str, ...]
    about: str
    required: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, with the media types of its request and of its successful response."""

    method: str
    path: str
    document: Mapping[str, Any]

    @property
    def tag(self) -> str:
        """The name of its section, empty without sections."""
        return next(iter(self.document.get("tags", ())), "")

    @property
    def parameters(self) -> Iterator[TableRow]:
        for each in self.document["parameters"]:
            choices = (f" `{value}`" for value in each["schema"].get("enum", ()))
            yield TableRow(each["name"], (each["in"], *choices), each.get("description", ""), each.get("required", False))

    @property
    def request_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return _kinds(self.document.get("requestBody", {}))

    @property
    def examples(self) -> Iterator[Any]:
        """Example request bodies."""
        for each in self.document.get("requestBody", {}).get("content", {}).values():
            if "example" in each:
                yield each["example"]

    @property
    def response_kinds(self) -> Mapping[str, tuple[str, ...]]:
        return _kinds(self.document["responses"][min(self.document["responses"])])  # 200, or 202 for an operation that has only started


def operations(document: Mapping[str, Any]) -> Iterator[Operation]:
    """Yield all operations in the document's order."""
    for path, methods in document["paths"].items():
        for method, item in methods.items():
            yield Operation(method.upper(), path, item)


def curl(operation: Operation) -> str | None:
    """Return a command that calls an operation of the data port, or None if no request is shown.

    It uses the environment variables of OpenAI's SDKs. The reader replaces ``MODEL`` and ``speech.wav``.
    """
    path, body = operation.path.replace("{model}", "MODEL"), _body_options(operation)
    takes_key = any("x-api-key" in each for each in operation.document.get("security", ()))
    if not body and not (operation.method == "GET" and takes_key):
        return None
    url = f"$OPENAI_BASE_URL/{path.removeprefix(_V1)}" if path.startswith(_V1) else f"${{OPENAI_BASE_URL%/v1}}{path}"
    return " \\\n  ".join([f'curl "{url}"', '-H "Authorization: Bearer $OPENAI_API_KEY"', *body])


def _body_options(operation: Operation) -> list[str]:
    if "multipart/form-data" in operation.request_kinds:
        return ["-F model=MODEL", "-F file=@speech.wav"]
    sent = [f"-d {shlex.quote(json.dumps(example))}" for example in operation.examples]
    return ['-H "Content-Type: application/json"', *sent] if sent else []


_V1 = "/v1/"


def responses(document: Mapping[str, Any], operation: Operation) -> Iterator[tuple[str, str]]:
    """Yield the statuses of an operation's responses, and what each means."""
    for status, item in operation.document["responses"].items():
        shared = document["components"]["responses"][item["$ref"].rpartition("/")[2]] if "$ref" in item else item
        yield status, shared["description"]


def _kinds(item: Schema) -> dict[str, tuple[str, ...]]:
    return {kind: tuple(kind_of(each.get("schema", {}))) for kind, each in item.get("content", {}).items()}


def rows(schema: Schema, path: str = "") -> Iterator[TableRow]:
    """Yield the fields of an object, and of nested objects."""
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        yield TableRow(path + name, tuple(kind_of(each)), each.get("description", ""), name in required)
        inner, mark = (each["items"], "[]") if "items" in each else (each, "")
        yield from rows(inner, f"{path}{name}{mark}.")


def kind_of(schema: Schema) -> Iterator[str]:
    """Yield the description of the values that a schema allows, as texts and references."""
    if "$ref" in schema:
        yield Ref(schema["$ref"].rpartition("/")[2])
    elif "anyOf" in schema and "properties" not in schema:
        yield from _alternatives(map(kind_of, schema["anyOf"]))
    elif "const" in schema:
        yield f"`{schema['const']}`"
    elif "enum" in schema:
        yield ", ".join("null" if value is None else f"`{value}`" for value in schema["enum"])
    else:
        yield from _typed(schema)


def _alternatives(kinds: Iterable[Iterable[str]]) -> Iterator[str]:
    for index, pieces in enumerate(dict.fromkeys(map(tuple, kinds))):
        if index:
            yield " or "
        yield from pieces


_TYPE_NAMES = {"string": "text", "integer": "whole number", "boolean": "true or false", "array": "list", "null": "null"}


def _typed(schema: Schema) -> Iterator[str]:
    types = schema.get("type", "anything")
    yield from _alternatives(_of_type(name, schema) for name in ([types] if isinstance(types, str) else types))


def _of_type(name: str, schema: Schema) -> Iterator[str]:
    yield _TYPE_NAMES.get(name, name) + (_bounds(schema) if name in ("integer", "number") else "")
    if name == "array" and "items" in schema:
        yield " of "
        yield from kind_of(schema["items"])


def _bounds(schema: Schema) -> str:
    labels = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "up to"))
    item = [f"{label} {schema[name]}" for name, label in labels if name in schema]
    return f" {' '.join(item)}" if item else ""
