"""Generates api.md, and the tables of balance policies and settings, of the ledger's columns, and of its migrations in other pages.

Run it as ``.venv/bin/python docs/reference.py``. The rule: descriptions and defaults of settings come from ``gateway.config``, those of
policies from ``upstream.balancing.policies``, the API from ``gateway.api.reference``, columns from ``gateway.ledger.row``, and migrations
from their docstrings. A test compares the pages with the output.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.api.reference import descriptions, document
from gateway.api.reference.descriptions import Operation, Ref, TableRow
from gateway.config import schema
from gateway.ledger.row import COLUMNS
from upstream.balancing.policies import POLICIES

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin: made by docs/reference.py -->", "<!-- end -->"
_LISTS = {
    "text": "list of texts",
    "share, e.g. `5%`": "list of shares, e.g. `5%`",
    "whole number, at least 0": "list of whole numbers",
    "list of whole numbers": "list of lists of numbers",
}
_UNITS = {"KiB": "size, e.g. `20MiB`", "ms": "duration, e.g. `30s`"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a section. ``path``: ``models[].launch.args``."""

    path: str
    name: str
    shape: Mapping[str, Any]
    required: bool


@dataclass(frozen=True, slots=True)
class Group:
    """One section with its keys, its sub-sections' among them as one key each."""

    path: str
    about: str
    settings: tuple[Setting, ...]


def groups() -> Iterator[Group]:
    """Yield every section, the file itself first, each before its sub-sections."""
    whole = schema()
    yield from _groups(whole, whole["$defs"], "")


def _groups(section: Mapping[str, Any], known: Mapping[str, Any], path: str) -> Iterator[Group]:
    required = section.get("required", ())
    prefix = f"{path}." if path else ""
    settings = tuple(Setting(prefix + name, name, shape, name in required) for name, shape in section["properties"].items())
    yield Group(path, section["description"], settings)
    for setting in settings:
        name, repeated = _section(setting.shape)
        if name is not None:
            yield from _groups(known[name], known, setting.path + "[]" * repeated)


def _section(shape: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the section that a key holds, and whether the key holds a list of them."""
    for choice in _choices(shape):
        for each, repeated in ((choice, False), (choice.get("items", {}), True)):
            if "$ref" in each:
                return each["$ref"].rpartition("/")[2], repeated
    return None, False


def _choices(shape: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives for a key's value, without null."""
    choices: list[Mapping[str, Any]] = [shape]
    for keyword in ("anyOf", "oneOf"):
        choices = [each for choice in choices for each in choice.get(keyword, [choice])]
    return [choice for choice in choices if choice.get("type") != "null"]


def holds(shape: Mapping[str, Any]) -> str:
    """Describe the values of a key that holds no section."""
    kinds = [_kind(choice) for choice in _choices(shape)]
    if any("env" in choice.get("properties", {}) for choice in _choices(shape)):
        kinds = [*(kind for kind in kinds if kind != "mapping"), "`{env: NAME}` or `{file: PATH}`"]
    return " or ".join(dict.fromkeys(kinds))


def _kind(shape: Mapping[str, Any]) -> str:
    if "enum" in shape:
        return ", ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in shape["enum"])
    unit = next((text for mark, text in _UNITS.items() if f"{mark}|" in shape.get("pattern", "")), None)
    if unit is not None:
        return unit
    if shape.get("pattern", "").endswith("(%)$"):
        return "share, e.g. `5%`"
    if shape["type"] == "array":
        return _LISTS.get(holds(shape["items"]), f"list of {holds(shape['items'])}")
    kinds = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` or `false`", "object": "mapping"}
    return kinds[shape["type"]] + _bounds(shape)


def _bounds(shape: Mapping[str, Any]) -> str:
    least, above, most = shape.get("minimum"), shape.get("exclusiveMinimum"), shape.get("maximum")
    if least is not None and most is not None:
        return f", {_number(least)} to {_number(most)}"
    bounds = (("at least", least), ("more than", above), ("at most", most))
    return "".join(f", {label} {_number(bound)}" for label, bound in bounds if bound is not None)


def _number(value: float) -> str:
    return f"{value:.12g}" if abs(value) < 1e12 else f"{value:g}"


def default(setting: Setting) -> str:
    """Describe the default of a key."""
    value = setting.shape.get("default")
    if setting.required:
        return "**required**"
    if value is None or value in ([], {}) or _section(setting.shape)[0] is not None:
        return "-"
    if isinstance(value, float):
        value = f"{value:g}"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def balance_policies() -> str:
    """Return all balance policies as Markdown."""
    rows = [f"| `{name}` | {policy.description} |" for name, policy in POLICIES.items()]
    return "\n".join(["| `balance` | The server that gets a request |", "|---|---|", *rows])


def reference() -> str:
    """Return all sections as Markdown."""
    return "\n\n".join(map(_table, groups()))


def _table(group: Group) -> str:
    title = f"### `{group.path}`" if group.path else "### The file"
    return "\n".join([title, "", group.about, "", "| key | meaning | value | default |", "|---|---|---|---|", *map(_row, group.settings)])


def _row(setting: Setting) -> str:
    cells = (f"`{setting.name}`", setting.shape["description"], _value(setting), default(setting))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(setting: Setting) -> str:
    section, repeated = _section(setting.shape)
    if section is None:
        return holds(setting.shape)
    anchor = "".join(letter for letter in setting.path if letter.isalnum() or letter in "_-")
    return f"list of [sections](#{anchor})" if repeated else f"[section](#{anchor})"


# The API


def api() -> str:
    """Return the data port's routes, their errors and the shapes of their bodies as Markdown."""
    whole = document()
    parts = [whole["info"]["description"], _statuses(whole), _headers(whole)]
    tag = None
    for operation in descriptions.operations(whole):
        if operation.document["tags"] != tag:
            tag = operation.document["tags"]
            parts.append(f"## {tag[0]}")
        parts.append(_operation(operation))
    shapes = [_shape(name, schema) for name, schema in whole["components"]["schemas"].items()]
    return "\n\n".join([*parts, "## Shapes", *shapes])


def _statuses(whole: Mapping[str, Any]) -> str:
    responses = {name: each for name, each in whole["components"]["responses"].items() if name.startswith("Error")}
    rows = [f"| {name.removeprefix('Error')} | {each['description']} |" for name, each in responses.items()]
    text = "Every route can return these errors; 403 and 409 are of [self-service](self-service.md). [Errors](errors.md) explains each."
    return "\n".join(["## Errors", "", text, "",
                      "| status | codes |", "|---|---|", *rows])  # fmt: skip


def _headers(whole: Mapping[str, Any]) -> str:
    requests = {
        row.name: row.about for operation in descriptions.operations(whole) for row in operation.parameters if row.kind == ("header",)
    }
    responses = {name: each["description"] for name, each in whole["components"]["headers"].items()}
    rows = [f"| `{name}` | request | {about} |" for name, about in requests.items()]
    rows += [f"| `{name}` | response | {about} |" for name, about in responses.items()]
    return "\n".join(["## Headers", "", "| header | of the | meaning |", "|---|---|---|", *rows])


def _operation(operation: Operation) -> str:
    texts = operation.document
    about = " ".join(texts[name] for name in ("summary", "description") if name in texts)
    lines = [f"### {operation.method} {operation.path}", "", about, ""]
    lines += [f"- request: {_bodies(operation.request_kinds)}"] if operation.request_kinds else []
    lines += [f"- response: {_bodies(operation.response_kinds)}"]
    call = descriptions.curl(operation)
    return "\n".join(lines) + (f"\n\n```sh\n{call}\n```" if call else "")


def _bodies(kinds: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"`{kind}`: {_pieces(pieces)}" for kind, pieces in kinds.items())


def _shape(name: str, schema: Mapping[str, Any]) -> str:
    rows = [_field(row) for row in descriptions.rows(schema)]
    about = schema.get("description", "")
    if not rows:
        return f"### {name}\n\n{about + ': ' if about else ''}{_pieces(descriptions.kind_of(schema))}"
    table = "\n".join(["| field | value | meaning |", "|---|---|---|", *rows])
    return f"### {name}\n\n{about + chr(10) * 2 if about else ''}{table}"


def _field(row: TableRow) -> str:
    needed = ["**required**"] if row.required else []
    return f"| `{row.name}` | {_pieces(row.kind)} | {'; '.join([*needed, *filter(None, [row.about])])} |"


def _pieces(pieces: Iterable[str]) -> str:
    return "".join(f"[{piece}](#{piece.lower()})" if isinstance(piece, Ref) else piece for piece in pieces)


# The ledger


def ledger() -> str:
    """Return the columns of the ledger's table as Markdown."""
    rows = [f"| `{column.name}` | {column.content} | {column.dimension or ''} |" for column in COLUMNS]
    return "\n".join(["| column | content | `usage --by` |", "|---|---|---|", *rows])


def migrations() -> str:
    """Return the steps of the ledger's table as Markdown."""
    rows = []
    for file in sorted((ROOT / "gateway" / "ledger" / "migrations" / "versions").glob("step_*.py")):
        change, _, since = (ast.get_docstring(ast.parse(file.read_text())) or "").partition(".\n\nSince: ")
        rows.append(f"| {file.stem.removeprefix('step_')} | {since} | {change[:1].lower()}{change[1:]} |")
    return "\n".join(["| migration | since | change |", "|---|---|---|", *rows])


PAGES: dict[Path, tuple[Callable[[], str], ...]] = {
    ROOT / "docs" / "configuration.md": (balance_policies, reference),
    ROOT / "docs" / "api.md": (api,),
    ROOT / "docs" / "usage.md": (ledger,),
    ROOT / "docs" / "operators" / "upgrades.md": (migrations,),
}


def renewed(path: Path) -> str:
    """Return the text of a page with its generated parts replaced."""
    first, *rest = path.read_text().split(BEGIN)
    parts = [f"{BEGIN}\n\n{make()}\n\n{END}{old.partition(END)[2]}" for make, old in zip(PAGES[path], rest, strict=True)]
    return first + "".join(parts)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page))
