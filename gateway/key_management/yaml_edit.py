"""Edit a YAML text and leave every other byte unchanged: comments, order, quotes, indentation. Pure, from text to text.

New text is on separate lines, or in flow style if it replaces something. The rule: the caller has parsed the text
(``config.source`` bounds its depth), parses the result and checks its content, as ``key_file`` does. Some YAML is
damaged by these edits, for example an alias in place of the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from gateway.config.problems import Path

_BOM = "\ufeff"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast; both count positions in characters, after a BOM
_PLAIN = re.compile(r"sha256:[0-9a-f]{64}")


class UneditableError(Exception):
    """The text has a form that cannot be edited."""


@dataclass(frozen=True, slots=True)
class _Splice:
    """Replace the text between two positions."""

    start: int
    end: int
    text: str


def append_entries(text: str, path: Path, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the text with these mappings appended to the list at ``path``, which is created at the end of the text if it is missing.

    Raises UneditableError.
    """
    if text.startswith(_BOM):
        return _BOM + append_entries(text.removeprefix(_BOM), path, entries)
    node = _at(_root(text), path)
    if isinstance(node, yaml.SequenceNode):
        return _spliced(text, _append(text, node, entries))
    if isinstance(node, yaml.ScalarNode) and not node.value:
        return _spliced(text, [_Splice(at := _line_end(text, node.end_mark.index), at, _lines(entries, 2))])
    if node is not None or len(path) != 1:
        raise UneditableError("there is no list to append to")
    line_break = "" if text.endswith("\n") or not text else "\n"
    return _spliced(text, [_Splice(len(text), len(text), f"{line_break}{path[0]}:{_lines(entries, 2)}\n")])


def set_field(text: str, path: Path, name: str, value: Any) -> str:
    """Return the text with a field of the mapping at ``path`` set. Raises UneditableError."""
    if text.startswith(_BOM):
        return _BOM + set_field(text.removeprefix(_BOM), path, name, value)
    node = _at(_root(text), path)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise UneditableError("there is no mapping to change")
    current = next((child for key, child in node.value if key.value == name), None)
    return _spliced(text, _set(text, node, name, value) if current is None else list(_replace(text, current, value)))


def stanza(entry: Mapping[str, Any], indent: int) -> str:
    """Write a mapping as an item of a block list, on separate lines; quoted text is written as JSON, which is valid YAML."""
    first, *rest = (f"{name}: {_flow(value)}" for name, value in entry.items())
    return "\n".join([f"{' ' * indent}- {first}", *(f"{' ' * (indent + 2)}{line}" for line in rest)])


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    if isinstance(value, float):
        return f"{Decimal(repr(value)):f}"  # YAML 1.1 reads 1e-05 as text
    return json.dumps(value, ensure_ascii=False)


def _lines(entries: Sequence[Mapping[str, Any]], indent: int) -> str:
    return "".join(f"\n{stanza(entry, indent)}" for entry in entries)


# Positions


def _root(text: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise UneditableError("this is not YAML") from error
    return root


def _at(node: yaml.Node | None, path: Path) -> yaml.Node | None:
    for part in path:
        if isinstance(node, yaml.MappingNode):
            node = next((child for key, child in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        else:
            return None
    return node


def _end(node: yaml.Node) -> int:
    """Return the position of the end of a node's own text. The end mark of a block is at the next token, after comments and blank lines."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    """Return the end of the line of a position; the position after a line's end belongs to that line."""
    if at and text[at - 1] == "\n":
        at -= 1
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if text[found - 1 : found] == "\r" else found


def _spliced(text: str, splices: Sequence[_Splice]) -> str:
    end = "\r\n" if text[: text.find("\n") + 1].endswith("\r\n") else "\n"  # as at the end of the first line
    for splice in sorted(splices, key=lambda splice: splice.start, reverse=True):
        text = text[: splice.start] + splice.text.replace("\n", end) + text[splice.end :]
    return text


# Edits


def _append(text: str, node: yaml.SequenceNode, values: Sequence[Any]) -> list[_Splice]:
    if node.flow_style:
        at = _end(node.value[-1]) if node.value else int(node.start_mark.index) + 1
        written = ", ".join(map(_flow, values))
        return [_Splice(at, at, f", {written}" if node.value else written)]
    at, column = _line_end(text, _end(node)), node.start_mark.column
    written = "".join(f"\n{stanza(v, column) if isinstance(v, Mapping) else ' ' * column + '- ' + _flow(v)}" for v in values)
    return [_Splice(at, at, written)]


def _set(text: str, node: yaml.MappingNode, name: str, value: Any) -> list[_Splice]:
    """Add a field after the last one."""
    written = f"{name}: {_flow(value)}"
    if node.flow_style:
        return [_Splice(at := _end(node.value[-1][1]), at, f", {written}")]
    return [_Splice(at := _line_end(text, _end(node)), at, f"\n{' ' * node.start_mark.column}{written}")]


def _replace(text: str, node: yaml.Node, value: Any) -> Iterator[_Splice]:
    """Replace a value; in a list that grows, only the parts that differ."""
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list) and len(value) >= len(node.value) > 0:
        for child, one in zip(node.value, value, strict=False):
            if not (isinstance(child, yaml.ScalarNode) and child.value == one):
                yield _Splice(child.start_mark.index, _end(child), _flow(one))
        if more := value[len(node.value) :]:
            yield from _append(text, node, more)
    else:
        yield _Splice(node.start_mark.index, _end(node), _flow(value))
