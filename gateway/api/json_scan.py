"""Find requested fields of a JSON document that arrives in pieces of any size. Sans-I/O.

The rule: a field counts only at its own path in the document. The same bytes inside a string, or in a nested object, are data. The scanner
stores only an unfinished key, and takes time in proportion to the bytes: it skips the rest in long steps, so that lists of numbers and
long strings cost little. It does not validate. It reports nothing for text that is not a JSON object, and for a malformed document what it
found before the error. The position of the error may then depend on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import orjson

Wanted = Mapping[str, "Wanted | None"]
"""The wanted fields of an object by key: None for a field that is reported, a mapping for a field whose own fields are wanted. ELEMENT is
the only key for the elements of an array."""

ELEMENT = "[]"

_DOCUMENT, _KEY, _KEY_REST, _COLON, _VALUE, _VALUE_REST, _COMMA, _NOTHING = range(8)
"""The next thing that the scanner expects."""

_WHOLE_KEY = re.compile(rb'"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*')
_LONGEST_KEY = 256  # bytes of a key with its escapes that are compared
_STRING_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,\]}\s]*")
_QUOTE, _BACKSLASH, _OPENS_OBJECT, _OPENS_ARRAY = b'"\\{['
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ROUNDS = 3  # of removing balanced brackets; most documents nest no deeper
DEPTH_CHANGES = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))
"""How each character changes the depth."""
_WINDOW = 1024  # bytes of a first search for a structural character; four times as many each time
_FAR = 256  # bytes without a structural character above which searching is faster than reducing
_BLOCKS = (2048, 256)  # bytes that are reduced to their brackets at once; the smaller block if the value ends in the larger one


class Span(NamedTuple):
    """A part of a wanted value in the piece that was fed: its path, its start and end offsets, and whether the value ends there."""

    path: tuple[str, ...]
    start: int
    end: int
    is_last: bool


class Scanner:
    """Scans one document. ``wanted``: the wanted fields of the document itself."""

    __slots__ = ("_depth", "_escaped", "_expects", "_in_string", "_key", "_levels", "_path", "_reported", "_wanted")

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._expects = _DOCUMENT
        self._levels: list[tuple[Wanted, bool]] = []  # the open containers that lead to wanted fields, and whether they are arrays
        self._path: tuple[str, ...] = ()  # of the innermost container
        self._key = b""
        self._reported: tuple[str, ...] | None = None  # the path of the current value, if it is wanted
        self._depth = 0  # open brackets of the current value
        self._in_string = False
        self._escaped = False

    @property
    def finished(self) -> bool:
        """Whether the document has ended, or is not an object."""
        return self._expects == _NOTHING

    def feed(self, data: bytes) -> list[Span]:
        """Scan the next bytes. Returns the spans of wanted values in them, in their order."""
        spans: list[Span] = []
        at, size = 0, len(data)
        while at < size and self._expects != _NOTHING:
            if self._expects == _VALUE_REST:
                start, at = at, self._scan_value(data, at)
                if self._reported is not None:
                    spans.append(Span(self._reported, start, at, self._expects != _VALUE_REST))
            elif self._expects == _KEY_REST:
                at = self._scan_key(data, at)
            elif data[at] in b" \t\r\n":
                at = _end(_SPACE, data, at)
            else:
                at = self._next(data, at)
        return spans

    # Between values

    def _next(self, data: bytes, at: int) -> int:
        """Process the character at an offset, or start a key or a value there. Returns the offset to continue at."""
        character, expects = data[at], self._expects
        if character in _CLOSING and expects in (_KEY, _VALUE, _COMMA):
            self._close_container()
        elif expects == _VALUE:
            return self._start_value(character, at)
        elif expects == _KEY and character == _QUOTE:
            return self._start_key(data, at)
        elif expects == _COMMA and character == ord(","):
            self._expects = _VALUE if self._levels[-1][1] else _KEY
        elif expects == _COLON and character == ord(":"):
            self._expects = _VALUE
        elif expects == _DOCUMENT and character == _OPENS_OBJECT:
            self._open_container(self._wanted, array=False)
        else:
            self._expects = _NOTHING
        return at + 1

    def _open_container(self, wanted: Wanted, *, array: bool) -> None:
        self._levels.append((wanted, array))
        self._expects = _VALUE if array else _KEY

    def _close_container(self) -> None:
        self._levels.pop()
        self._path = self._path[:-1]
        self._expects = _COMMA if self._levels else _NOTHING

    def _start_key(self, data: bytes, at: int) -> int:
        if (whole := _WHOLE_KEY.match(data, at)) is not None:
            self._key = whole[1]
            self._expects = _VALUE
            return whole.end()
        self._key, self._in_string = b"", True
        self._expects = _KEY_REST
        return at + 1

    def _scan_key(self, data: bytes, at: int) -> int:
        end = self._scan_string(data, at)
        self._key = (self._key + data[at : min(end, at + _LONGEST_KEY)])[:_LONGEST_KEY]
        if not self._in_string:
            self._key = _unescaped(self._key[:-1])
            self._expects = _COLON
        return end

    def _start_value(self, character: int, at: int) -> int:
        """Open a container that leads to wanted fields; any other value is scanned to its end."""
        wanted, array = self._levels[-1]
        name = ELEMENT if array else self._key.decode("utf-8", "replace")
        self._expects = _VALUE_REST
        self._reported = None
        self._depth = 0
        if name in wanted:
            if (inner := wanted[name]) is None:
                self._reported = (*self._path, name)
            elif character == (_OPENS_ARRAY if ELEMENT in inner else _OPENS_OBJECT):
                self._path = (*self._path, name)
                self._open_container(inner, array=ELEMENT in inner)
                return at + 1
        return at

    # Through a value

    def _scan_value(self, data: bytes, at: int) -> int:
        """Start or continue a value. Returns the offset up to which it was scanned."""
        if not self._depth and not self._in_string:
            character = data[at]
            if character == _QUOTE:
                self._in_string = True
            elif character in _OPENING:
                self._depth = 1
            else:
                return self._scan_scalar(data, at)
            at += 1
        size = len(data)
        while at < size:
            at = self._scan_string(data, at) if self._in_string else self._scan_parts(data, at)
            if not self._depth and not self._in_string:
                self._expects = _COMMA
                break
        return at

    def _scan_scalar(self, data: bytes, at: int) -> int:
        end = _end(_SCALAR, data, at)
        if end < len(data):
            self._expects = _COMMA
        return end

    def _scan_string(self, data: bytes, at: int) -> int:
        """Continue a string. Returns the offset after its closing quote, or the end of the data."""
        size = len(data)
        if self._escaped:
            self._escaped = False
            at += 1
        end = data.find(b'"', at)
        if end < 0 and (at >= size or data[-1] != _BACKSLASH):
            return size
        if end < 0 or (end > at and data[end - 1] == _BACKSLASH):
            end = _end(_STRING_REST, data, at)
            if end == size:
                return size
            if data[end] == _BACKSLASH:
                self._escaped = True
                return size
        self._in_string = False
        return end + 1

    def _scan_parts(self, data: bytes, at: int) -> int:
        """Scan one or more characters of a container, outside of strings. Returns the offset after them."""
        found_at = _next_structural(data, at)
        if found_at - at < _FAR:
            for size in _BLOCKS:
                if at + size <= len(data) and self._skips(data[at : at + size]):
                    return at + size
        if found_at == len(data):
            return found_at
        character = data[found_at]
        if character == _QUOTE:
            self._in_string = True
        elif character in _OPENING:
            self._depth += 1
        else:
            self._depth -= 1
        return found_at + 1

    def _skips(self, block: bytes) -> bool:
        """Skip these bytes, which start outside of strings, unless the value ends in them. Returns whether they were skipped.

        First strings and all other characters than brackets are removed, then most pairs of brackets, the inner ones first.
        """
        escaped = False
        if b"\\" in block:
            escaped = (len(block) - len(block.rstrip(b"\\"))) % 2 == 1
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = block.split(b'"')
        brackets = b"".join(parts[::2]).translate(None, _NO_BRACKETS)
        for _ in range(_ROUNDS):
            brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
        depths = list(accumulate(map(DEPTH_CHANGES.__getitem__, brackets), initial=self._depth))
        if min(depths) <= 0:
            return False
        self._depth = depths[-1]
        self._in_string = len(parts) % 2 == 0
        self._escaped = escaped
        return True


def _end(expression: re.Pattern[bytes], data: bytes, at: int) -> int:
    """Return the end of the expression's match at an offset."""
    found = expression.match(data, at)
    return at if found is None else found.end()


def _next_structural(data: bytes, at: int) -> int:
    """Return the offset of the next quote or bracket, or the end of the data.

    Five searches for one byte each are ten times as fast as one regular expression for all five bytes. The windows grow, so that each byte
    is searched a few times at most.
    """
    window, size = _WINDOW, len(data)
    while at < size:
        end = limit = min(at + window, size)
        for character in (b'"', b"]", b"[", b"}", b"{"):
            found_at = data.find(character, at, end)
            if found_at >= 0:
                end = found_at
        if end < limit:
            return end
        at, window = limit, 4 * window
    return size


def _unescaped(key: bytes) -> bytes:
    """Return a key without escapes. An invalid key is returned unchanged."""
    if b"\\" not in key:
        return key
    try:
        return str(orjson.loads(b'"%b"' % key)).encode()
    except orjson.JSONDecodeError:
        return key
