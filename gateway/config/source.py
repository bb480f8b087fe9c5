"""A YAML file as plain values with their line numbers.

The file is read from PyYAML's parse events, without its constructors. The result contains only mappings, lists, text, numbers, booleans,
dates and null. No input can run code, recurse deeply or grow without a limit. (The composer of libyaml's binding recurses in C and crashes
on 50,000 brackets.) The rule: reading continues after a mistake unless the rest cannot be parsed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import Reader
from yaml.resolver import Resolver

from gateway.config.problems import Finding, Path, Problem, spelled

MAX_DEPTH = 64
MAX_ALIASED_VALUES = 100_000
MAX_FILE = 64 << 20
"""Bytes; a hundred thousand keys are twenty million."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_TEXT = f"{_TAG}str"
_FIRST_CHARACTERS = frozenset(Resolver.yaml_implicit_resolvers)
"""The first characters of scalars that may not be text."""
_DECIMAL = re.compile(
    r"[-+]?(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:[0-9_]+(?:[eE][-+][0-9]+)?|inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
"""Numbers that everyone reads alike. In YAML 1.1, ``010`` is 8 and ``1:30`` is 90."""
_CONTAINER_TAGS = {None, "!", f"{_TAG}map", f"{_TAG}seq"}
_NUMBER_TAGS = {f"{_TAG}int", f"{_TAG}float"}
_SCALAR_TAGS = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}


@dataclass(slots=True)
class Source:
    """One file: its plain ``value``, the line of each part, and its YAML problems."""

    file: str
    value: Any = None
    problems: list[Problem] = field(default_factory=list)
    whole: bool = False
    """Whether the file was read to its end, so that its content can be validated."""
    lines: dict[int, dict[Any, int]] = field(default_factory=dict)
    """By the id of a container (``value`` refers to it): the line of each key or position."""

    def line(self, path: Path) -> int:
        """Return the line of ``path``, or of the nearest enclosing value if it is not in the file."""
        found, value = 1, self.value
        for part in path:
            line = self.lines[id(value)].get(part) if isinstance(value, dict | list) else None
            if line is None:
                break
            found, value = line, value[part]
        return found

    def problem(self, finding: Finding) -> Problem:
        path = finding.path
        if path and isinstance(path[-1], int) and not isinstance(self.at(path[:-1]), list):
            path = path[:-1]  # a single value instead of a list, which validation treats as a list of one
        return Problem(self.file, self.line(path), spelled(path), finding.message)

    def at(self, path: Path) -> Any:
        """Return the value at ``path``, or None."""
        value = self.value
        for part in path:
            if part not in (self.lines[id(value)] if isinstance(value, dict | list) else ()):
                return None
            value = value[part]
        return value

    def wrap(self, key: str) -> None:
        """Make a bare list the value of ``key``, so that both notations have the same value."""
        wrapped = {key: self.value}
        self.lines[id(wrapped)] = {key: 1}
        self.value = wrapped


def read(path: str | os.PathLike[str]) -> Source:
    """Read the file at ``path``. An unreadable or invalid file does not raise; its ``problems`` contain the reason."""
    file = os.fspath(path)
    try:
        with FilePath(path).open("rb") as opened:
            data = opened.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:
        return Source(file, problems=[Problem(file, 0, "", f"cannot be read: {reason(error)}")])
    if len(data) > MAX_FILE:
        return Source(file, problems=[Problem(file, 0, "", f"cannot be read: it is larger than {MAX_FILE >> 20} MiB")])
    try:
        return parse(data.decode("utf-8-sig"), file)
    except UnicodeDecodeError as error:
        return Source(file, problems=[Problem(file, data.count(b"\n", 0, error.start) + 1, "", "this is not UTF-8 text")])


def reason(error: Exception) -> str:
    """Return why a file cannot be used, without Python's formatting."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def parse(text: str, file: str) -> Source:
    """Parse ``text`` into a ``Source`` with the name ``file``."""
    if unprintable := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, unprintable.start()) + 1
        return Source(file, problems=[Problem(file, line, "", f"the character {unprintable[0]!a} is not allowed in YAML")])
    parser = _Parser(Source(file))
    try:
        parser.run(yaml.parse(text, Loader=_LOADER))
        parser.source.whole = True
    except yaml.MarkedYAMLError as error:
        lines = text.splitlines() or [""]
        mark = error.problem_mark or error.context_mark
        line = min(mark.line + 1 if mark else 1, len(lines))
        parser.say(line, (), _what_is_wrong(error, lines[line - 1]))
    except _Refused as error:
        parser.say(error.line, (), str(error))
    return parser.source


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _what_is_wrong(error: yaml.MarkedYAMLError, line: str) -> str:
    if re.match(r" *\t", line):
        return "a tab is used for indentation; YAML requires spaces"
    if error.problem and "could not find expected ':'" in error.problem:
        return f"this is not YAML: {error.problem} (is a colon missing, or a quote not closed?)"
    return f"this is not YAML: {error.problem or error.context}"


class _Refused(Exception):
    """The rest of the file cannot be parsed, or must not be read."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class _Frame:
    """An open mapping or list. ``size`` counts its values, including the values of each use of an alias."""

    value: Any
    is_mapping: bool
    line: int
    lines: dict[Any, int]
    anchor: str | None
    size: int = 1
    key: str | None = None
    key_line: int = 0
    merges: list[tuple[int, Any]] = field(default_factory=list)


class _Parser:
    """Turns events into values, with an explicit stack instead of recursion."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.resolver = Resolver()
        self.constructor = SafeConstructor()
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.aliased = 0
        self.documents = 0

    def say(self, line: int, path: Path, message: str) -> None:
        self.source.problems.append(Problem(self.source.file, line, spelled(path), message))

    def run(self, events: Iterator[yaml.Event]) -> None:
        takers: dict[type[yaml.Event], Callable[[Any], None]] = {
            yaml.DocumentStartEvent: self.document,
            yaml.MappingStartEvent: self.open,
            yaml.SequenceStartEvent: self.open,
            yaml.MappingEndEvent: self.close,
            yaml.SequenceEndEvent: self.close,
            yaml.ScalarEvent: self.scalar,
            yaml.AliasEvent: self.alias,
        }
        for event in events:
            if take := takers.get(type(event)):
                take(event)

    def document(self, event: yaml.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            raise _Refused(_line(event), "a second YAML document begins here; a configuration is one document")

    def scalar(self, event: yaml.ScalarEvent) -> None:
        line = _line(event)
        frame = self.stack[-1] if self.stack else None
        if frame is not None and frame.key is None and frame.is_mapping:
            frame.key, frame.key_line = event.value, line
            if event.anchor:
                self.anchors[event.anchor] = (event.value, 1)
            return
        value = self.plain(event, line)
        if event.anchor:
            self.anchors[event.anchor] = (value, 1)
        self.add(value, line, 1)

    def plain(self, event: yaml.ScalarEvent, line: int) -> Any:
        tag = event.tag if event.tag not in (None, "!") else self.tag(event)
        if tag == _TEXT:
            return event.value
        if tag not in _SCALAR_TAGS:
            self.say(line, self.here(), _bad_tag(tag))
            return None
        try:
            value = self.constructor.yaml_constructors[tag](self.constructor, yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, AttributeError, OverflowError):
            self.say(line, self.here(), f"this is not a valid {tag.removeprefix(_TAG)}; for text, write it in quotes")
            return None
        if tag in _NUMBER_TAGS and not _DECIMAL.fullmatch(event.value):
            self.say(
                line, self.here(), f"YAML reads this number as {value:,}; write it in decimal without leading zeros, or text in quotes"
            )
        return value

    def tag(self, event: yaml.ScalarEvent) -> str:
        """Return the tag of an untagged scalar: text if quoted, else by its form (YAML 1.1, as in PyYAML)."""
        if not event.implicit[0] or event.value[:1] not in _FIRST_CHARACTERS:
            return _TEXT
        return str(self.resolver.resolve(yaml.ScalarNode, event.value, event.implicit))  # type: ignore[no-untyped-call]

    def open(self, event: yaml.CollectionStartEvent) -> None:
        line = _line(event)
        if self.stack and self.stack[-1].key is None and self.stack[-1].is_mapping:
            raise _Refused(line, "a key is text, not a list or mapping")
        if len(self.stack) >= MAX_DEPTH:
            raise _Refused(line, f"more than {MAX_DEPTH} levels of nesting")
        if event.tag not in _CONTAINER_TAGS:
            self.say(line, self.here(), _bad_tag(event.tag))
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        self.stack.append(_Frame({} if is_mapping else [], is_mapping, line, {}, event.anchor))

    def close(self, _event: yaml.CollectionEndEvent) -> None:
        frame = self.stack.pop()
        self.merge(frame)
        self.source.lines[id(frame.value)] = frame.lines
        if frame.anchor:
            self.anchors[frame.anchor] = (frame.value, frame.size)
        self.add(frame.value, frame.line, frame.size)

    def alias(self, event: yaml.AliasEvent) -> None:
        line = _line(event)
        if event.anchor not in self.anchors:
            inside = any(frame.anchor == event.anchor for frame in self.stack)
            raise _Refused(line, f"`*{event.anchor}` {'refers to itself' if inside else 'refers to no anchor before it'}")
        if self.stack and self.stack[-1].key is None and self.stack[-1].is_mapping:
            raise _Refused(line, "a key must not be an alias")
        value, size = self.anchors[event.anchor]
        self.aliased += size
        if self.aliased > MAX_ALIASED_VALUES:
            raise _Refused(line, f"aliases expand to more than {MAX_ALIASED_VALUES} values")
        self.add(value, line, size)

    def add(self, value: Any, line: int, size: int) -> None:
        """Add a complete value to its container."""
        if not self.stack:
            self.source.value = value
            return
        frame = self.stack[-1]
        frame.size += size
        if not frame.is_mapping:
            frame.lines[len(frame.value)] = line
            frame.value.append(value)
            return
        assert frame.key is not None
        if frame.key == "<<":
            frame.merges.append((frame.key_line, value))
        elif frame.key in frame.value:
            self.say(frame.key_line, self.here(), f"this key is already on line {frame.lines[frame.key]}")
        else:
            frame.value[frame.key], frame.lines[frame.key] = value, frame.key_line
        frame.key = None

    def here(self) -> Path:
        """Return the path of the next value."""
        return tuple(frame.key if frame.key is not None else len(frame.value) for frame in self.stack)

    def merge(self, frame: _Frame) -> None:
        """Apply YAML's merge key (``<<: *anchor``). The mapping's own keys take precedence, then the first merged mapping."""
        for line, merged in frame.merges:
            for mapping in merged if isinstance(merged, list) else [merged]:
                if not isinstance(mapping, dict):
                    self.say(line, (*self.here(), "<<"), "`<<` merges mappings only")
                    continue
                for key, value in mapping.items():
                    if key not in frame.value:
                        frame.value[key], frame.lines[key] = value, self.source.lines[id(mapping)][key]


def _bad_tag(tag: object) -> str:
    return f"the tag `{str(tag).replace(_TAG, '!!')}` is not allowed; write a plain value"
