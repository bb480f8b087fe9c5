"""Create a small valid instance of a JSON schema, and a text that matches a simple regular expression.

The rule: every result is valid. If no valid result can be created, an exception is raised, and the caller reports the
error in vLLM's form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from upstream.simulator.text.speaker import Speaker

Schema = Mapping[str, Any]

_FORMATS: Final = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "ipv4": "192.0.2.1",
    "hostname": "example.com",
}


_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


class UnsatisfiableSchemaError(ValueError):
    """The schema or the expression is malformed, or requires more than this module supports."""


def instance(schema: Schema | bool, speaker: Speaker) -> Any:
    """Return a valid instance of the schema, as small as its bounds allow. Raises UnsatisfiableSchemaError."""
    return _Maker(schema if isinstance(schema, Mapping) else {}, speaker).value(schema, 0)


class _Maker:
    """Create an instance of one schema. ``root`` is needed to resolve its references."""

    def __init__(self, root: Schema, speaker: Speaker) -> None:
        self._root = root
        self._speaker = speaker
        self._by_type: dict[str, Callable[[Schema, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda _schema, _depth: True,
            "null": lambda _schema, _depth: None,
        }

    def value(self, schema: Any, depth: int) -> Any:
        if depth > 32:
            raise UnsatisfiableSchemaError("the schema requires values that are nested too deeply")
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise UnsatisfiableSchemaError(f"no schema: {schema!r}")
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]), depth + 1)
        for several in ("anyOf", "oneOf"):
            if schema.get(several):
                return self.value({**_without(schema, several), **_as_schema(schema[several][0])}, depth + 1)
        if schema.get("allOf"):
            return self.value(_merged([_without(schema, "allOf"), *schema["allOf"]]), depth + 1)
        return self._of_type(schema, depth)

    def _of_type(self, schema: Schema, depth: int) -> Any:
        kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "object")
        if isinstance(kind, list):
            kind = kind[0]
        make = self._by_type.get(kind)
        if make is None:
            raise UnsatisfiableSchemaError(f"unknown type: {kind!r}")
        return make(schema, depth)

    def _resolve(self, reference: str) -> Any:
        node: Any = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if step and (not isinstance(node, Mapping) or step not in node):
                raise UnsatisfiableSchemaError(f"unresolved reference: {reference}")
            node = node[step] if step else node
        return node

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        made = {
            name: self.value(properties.get(name, {"type": "string"}), depth + 1) for name in [*properties, *required] if name in required
        }
        for extra in range(len(made), schema.get("minProperties", 0)):
            made[f"key{extra}"] = self._speaker.word()
        return made

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        prefix = [self.value(item, depth + 1) for item in schema.get("prefixItems") or []]
        missing = max(0, schema.get("minItems", 0) - len(prefix))
        return prefix + [self.value(schema.get("items", {"type": "string"}), depth + 1) for _ in range(missing)]

    def _string(self, schema: Schema, _depth: int) -> str:
        if "pattern" in schema:
            return matching(schema["pattern"], self._speaker)
        text: str = _FORMATS.get(schema.get("format", "")) or self._speaker.word()
        text += "x" * (schema.get("minLength", 0) - len(text))
        return text[: schema["maxLength"]] if "maxLength" in schema else text

    def _integer(self, schema: Schema, _depth: int) -> int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0 if "maximum" not in schema else min(0, schema["maximum"])))
        value = int(low) + (1 if "exclusiveMinimum" in schema else 0)
        step = int(schema.get("multipleOf", 1))
        return -(-value // step) * step

    def _number(self, schema: Schema, depth: int) -> float | int:
        bounded = not _BOUNDS.isdisjoint(schema)
        return self._integer(schema, depth) + (0 if bounded else 0.5)


def _without(schema: Schema, name: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name}


def _as_schema(schema: Any) -> Schema:
    return schema if isinstance(schema, Mapping) else {}


def _merged(schemas: list[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for schema in map(_as_schema, schemas):
        for key, value in schema.items():
            if key == "properties":
                merged[key] = {**merged.get(key, {}), **value}
            elif key == "required":
                merged[key] = [*merged.get(key, []), *value]
            else:
                merged[key] = value
    return merged


_CLASSES: Final = {"d": "7", "w": "w", "s": " ", "D": "x", "W": "-", "S": "x", "n": "\n", "t": "\t"}
_QUANTIFIER: Final = re.compile(r"\{(\d+)(?:,\d*)?\}|[*+?]")


def matching(pattern: str, speaker: Speaker) -> str:
    """Return a short text that ``pattern`` matches completely: literals, classes, groups, alternatives and counts.

    Raises Unmeetable for a malformed pattern and for unsupported features (look-around, back references).
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UnsatisfiableSchemaError(f"malformed expression: {error}") from error
    text, rest = _alternatives(pattern.removeprefix("^").removesuffix("$"), 0)
    if rest != len(pattern.removeprefix("^").removesuffix("$")) or not compiled.fullmatch(text):
        candidate = speaker.word()
        if not compiled.fullmatch(candidate):
            raise UnsatisfiableSchemaError(f"not a simple expression: {pattern}")
        return candidate
    return text


def _alternatives(pattern: str, at: int) -> tuple[str, int]:
    """Return the text of the first alternative, and the end of the group. Later alternatives are skipped."""
    text, at = _sequence(pattern, at)
    while at < len(pattern) and pattern[at] == "|":
        _, at = _sequence(pattern, at + 1)
    return text, at


def _sequence(pattern: str, at: int) -> tuple[str, int]:
    parts: list[str] = []
    while at < len(pattern) and pattern[at] not in "|)":
        atom, at = _atom(pattern, at)
        count, at = _count(pattern, at)
        parts.append(atom * count)
    return "".join(parts), at


def _atom(pattern: str, at: int) -> tuple[str, int]:
    character = pattern[at]
    if character == "(":
        text, at = _alternatives(pattern, at + (3 if pattern.startswith("(?:", at) else 1))
        return text, at + 1
    if character == "[":
        return _character_class(pattern, at + 1)
    if character == "\\":
        escaped = pattern[at + 1]
        return _CLASSES.get(escaped, escaped), at + 2
    return ("x" if character == "." else character), at + 1


def _character_class(pattern: str, at: int) -> tuple[str, int]:
    end = pattern.index("]", at + 1)
    body = pattern[at:end]
    if body.startswith("^"):
        excluded = re.compile(f"[{body}]")
        return next((c for c in "ax0 -_" if excluded.fullmatch(c)), "~"), end + 1
    return (_CLASSES.get(body[1], body[1]) if body.startswith("\\") else body[0]), end + 1


def _count(pattern: str, at: int) -> tuple[int, int]:
    found = _QUANTIFIER.match(pattern, at)
    if found is None:
        return 1, at
    end = found.end() + (1 if pattern[found.end() : found.end() + 1] == "?" else 0)
    if found[1] is not None:
        return int(found[1]), end
    return (0 if found[0] == "?" else 1), end
