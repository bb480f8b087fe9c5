"""Edits of a YAML text that leave every other byte as it is: comments, order, quotes, indentation.

Pure, from text to text. What is written new is on lines of its own, or in flow style where it replaces something. The rule:
who edits has read the text (``config.source``, which bounds how deep it is), reads the result and sees that it says what it should
(``keybook`` does); there is YAML that these edits spoil, e.g. where an alias stands for the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from gateway.config.problems import Path

_BOM = "\ufeff"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast; both count positions in characters, behind a BOM
_PLAIN = re.compile(r"sha256:[0-9a-f]{64}")


class UneditableError(Exception):
    """The text is not of a form that can be edited."""


@dataclass(frozen=True, slots=True)
class _Splice:
    """In place of what is between two positions, other text."""

    start: int
    end: int
    text: str


def append_entries(text: str, path: Path, entries: Sequence[Mapping[str, Any]]) -> str:
    """The text with these mappings at the end of the list at ``path``, which is made at the end of the text where there is none.

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
        raise UneditableError("there is no list to add to")
    begun = "" if text.endswith("\n") or not text else "\n"
    return _spliced(text, [_Splice(len(text), len(text), f"{begun}{path[0]}:{_lines(entries, 2)}\n")])


def set_member(text: str, path: Path, name: str, value: Any) -> str:
    """The text with a member of the mapping at ``path`` set. Raises UneditableError."""
    if text.startswith(_BOM):
        return _BOM + set_member(text.removeprefix(_BOM), path, name, value)
    node = _at(_root(text), path)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise UneditableError("there is no mapping to change")
    member = next((child for key, child in node.value if key.value == name), None)
    return _spliced(text, _set(text, node, name, value) if member is None else list(_replace(text, member, value)))


def stanza(entry: Mapping[str, Any], indent: int) -> str:
    """A mapping as a member of a block list, on lines of its own; quoted text is written as JSON, which YAML reads."""
    first, *rest = (f"{name}: {_flow(value)}" for name, value in entry.items())
    return "\n".join([f"{' ' * indent}- {first}", *(f"{' ' * (indent + 2)}{line}" for line in rest)])


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _lines(entries: Sequence[Mapping[str, Any]], indent: int) -> str:
    return "".join(f"\n{stanza(entry, indent)}" for entry in entries)


# Where things are


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
    """Where a node's own text ends. A block's mark is where the next token begins, behind comments and blank lines."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    """The end of the line that a position is on; behind a line's end it is that line."""
    if at and text[at - 1] == "\n":
        at -= 1
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if text[found - 1 : found] == "\r" else found


def _spliced(text: str, splices: Sequence[_Splice]) -> str:
    end = _line_break(text)
    for splice in sorted(splices, key=lambda splice: splice.start, reverse=True):
        text = text[: splice.start] + splice.text.replace("\n", end) + text[splice.end :]
    return text


def _line_break(text: str) -> str:
    """What the text's first line ends with."""
    return "\r\n" if text[: text.find("\n") + 1].endswith("\r\n") else "\n"


# What is put there


def _append(text: str, node: yaml.SequenceNode, values: Sequence[Any]) -> list[_Splice]:
    if node.flow_style:
        at = _end(node.value[-1]) if node.value else int(node.start_mark.index) + 1
        written = ", ".join(map(_flow, values))
        return [_Splice(at, at, f", {written}" if node.value else written)]
    at, column = _line_end(text, _end(node)), node.start_mark.column
    written = "".join(f"\n{stanza(v, column) if isinstance(v, Mapping) else ' ' * column + '- ' + _flow(v)}" for v in values)
    return [_Splice(at, at, written)]


def _set(text: str, node: yaml.MappingNode, name: str, value: Any) -> list[_Splice]:
    """A new member behind the last one."""
    written = f"{name}: {_flow(value)}"
    if node.flow_style:
        return [_Splice(at := _end(node.value[-1][1]), at, f", {written}")]
    return [_Splice(at := _line_end(text, _end(node)), at, f"\n{' ' * node.start_mark.column}{written}")]


def _replace(text: str, node: yaml.Node, value: Any) -> Iterator[_Splice]:
    """Another value in place of one; of a list that grows, only what differs."""
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list) and len(value) >= len(node.value) > 0:
        for child, one in zip(node.value, value, strict=False):
            if not (isinstance(child, yaml.ScalarNode) and child.value == one):
                yield _Splice(child.start_mark.index, _end(child), _flow(one))
        if more := value[len(node.value) :]:
            yield from _append(text, node, more)
    else:
        yield _Splice(node.start_mark.index, _end(node), _flow(value))
