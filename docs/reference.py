"""Writes what documents say of settings: the reference in configuration.md, and in README.md what has no effect yet.

Run it as ``.venv/bin/python docs/reference.py``. The rule: nothing is said here about a setting; its description,
its default and what has no effect yet come from ``gateway.config``. A test holds the documents to what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config import schema

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin: made by docs/reference.py -->", "<!-- end -->"
_LISTS = {"text": "list of texts", "whole number, at least 0": "list of whole numbers", "list of whole numbers": "list of lists of numbers"}
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
    """Every section, the file itself first, each before those below it."""
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
    """The section that a key holds, and whether it is a list of them."""
    for one in _choices(shape):
        for place, repeated in ((one, False), (one.get("items", {}), True)):
            if "$ref" in place:
                return place["$ref"].rpartition("/")[2], repeated
    return None, False


def _choices(shape: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a key may hold, without null."""
    choices: list[Mapping[str, Any]] = [shape]
    for word in ("anyOf", "oneOf"):
        choices = [each for choice in choices for each in choice.get(word, [choice])]
    return [choice for choice in choices if choice.get("type") != "null"]


def holds(shape: Mapping[str, Any]) -> str:
    """What may be written into a key that holds no section, in words."""
    words = [_word(choice) for choice in _choices(shape)]
    if any("env" in choice.get("properties", {}) for choice in _choices(shape)):
        words = [*(word for word in words if word != "mapping"), "`{env: NAME}` or `{file: PATH}`"]
    return " or ".join(dict.fromkeys(words))


def _word(shape: Mapping[str, Any]) -> str:
    if "enum" in shape:
        return ", ".join(f"`{value}`" for value in shape["enum"])
    unit = next((words for mark, words in _UNITS.items() if f"{mark}|" in shape.get("pattern", "")), None)
    if unit is not None:
        return unit
    if shape["type"] == "array":
        return _LISTS.get(holds(shape["items"]), f"list of {holds(shape['items'])}")
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` or `false`", "object": "mapping"}
    return words[shape["type"]] + _bounds(shape)


def _bounds(shape: Mapping[str, Any]) -> str:
    least, most = shape.get("minimum"), shape.get("maximum")
    if most is not None:
        return f", {least:g} to {most:g}"
    return f", at least {least:g}" if least is not None else ""


def default(setting: Setting) -> str:
    """What holds when the key is not written."""
    value = setting.shape.get("default")
    if setting.required:
        return "**required**"
    if value is None or value in ([], {}) or _section(setting.shape)[0] is not None:
        return "-"
    if isinstance(value, float):
        value = f"{value:g}"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def reference() -> str:
    """All sections as Markdown."""
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


PAGES = {ROOT / "docs" / "configuration.md": reference}


def renewed(path: Path) -> str:
    """The text of a page with its made part made anew."""
    before, _, rest = path.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{PAGES[path]()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page))
