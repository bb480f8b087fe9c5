"""Another value for the member ``model`` of an answer, and every other byte as it was. Sans-I/O.

The rule: only the value of the document's own ``model`` is replaced, or of that in its ``response`` or ``message``, where
OpenAI's and Anthropic's streams have it; one deeper down, or the same text inside a string, is somebody's data. Nothing is
held back but the value itself, so JSON text of any length passes in pieces of any size.
"""

from __future__ import annotations

import re

import orjson

_SHALLOW = re.compile(rb'["{}\[\]:,]')
_DEEP = re.compile(rb'["{}\[\]]')  # where nothing is looked for, so that long lists of numbers cost nothing
_IN_STRING = re.compile(rb'["\\]')
_USUAL = re.compile(rb'(?:data: )?\{(?:"(?:id|object|created)":(?:"[^"\\]*"|\d+),)*"model":"([^"\\]*)"')  # how vLLM's answers begin
_HOLDERS = (b"response", b"message")
_LONGEST_KEY = 8
_OPENING = b"{["


class Renaming:
    """Replaces the name in one document. An event of a stream may be fed as it is: its field names hold no JSON."""

    __slots__ = ("_depth", "_done", "_escaped", "_in_string", "_in_value", "_key", "_level", "_name", "_replacing", "_word")

    def __init__(self, name: str) -> None:
        self._name = orjson.dumps(name)
        self._depth = 0
        self._level = 0  # how many of the open brackets lead to where the member may be
        self._key = b""  # the last string at that level that stands before a colon
        self._word = b""
        self._in_value = False
        self._in_string = False
        self._escaped = False
        self._replacing = False
        self._done = False

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the document, with the name replaced."""
        if self._done:
            return data
        out, at, kept = [], 0, 0
        while at < len(data) and not self._done:
            if self._in_string:
                replacing = self._replacing
                at, ended = self._through_string(data, at)
                if replacing:
                    out.append(self._name if ended else b"")
                    kept = at
                continue
            token = (_SHALLOW if self._depth == self._level else _DEEP).search(data, at)
            if token is None:
                break
            at = token.end()
            if self._meets(token[0]):
                out.append(data[kept : at - 1])
                kept = at
        if not self._replacing:
            out.append(data[kept:])
        return b"".join(out)

    def _through_string(self, data: bytes, at: int) -> tuple[int, bool]:
        """Read on in a string; returns up to where, and whether it has ended there."""
        start = at
        if self._escaped:
            self._escaped, at = False, at + 1
        while (token := _IN_STRING.search(data, at)) is not None:
            at = token.end()
            if token[0] == b'"':
                self._word = (self._word + data[start : at - 1])[: _LONGEST_KEY + 1]
                self._in_string = False
                self._done, self._replacing = self._replacing, False
                return at, True
            self._escaped = at == len(data)
            at += 1
        self._word = (self._word + data[start:])[: _LONGEST_KEY + 1]
        return len(data), False

    def _meets(self, token: bytes) -> bool:
        """Take note of a structural character; returns whether it opens the string that is to be replaced."""
        shallow = self._depth == self._level
        if token == b'"':
            self._in_string, self._word = True, b""
            self._replacing = shallow and self._in_value and self._key == b"model"
            return self._replacing
        if token == b":":
            self._key, self._in_value = self._word, True
        elif token == b",":
            self._key, self._in_value = b"", False
        elif token in _OPENING:
            self._open(token, shallow)
        else:
            self._close()
        return False

    def _open(self, token: bytes, shallow: bool) -> None:
        leads = shallow and token == b"{" and (self._level == 0 or (self._level == 1 and self._key in _HOLDERS))
        self._depth += 1
        if leads:
            self._level += 1
            self._key, self._in_value = b"", False

    def _close(self) -> None:
        self._depth -= 1
        self._level = min(self._level, self._depth)
        self._done = self._depth <= 0


def renamed(data: bytes, name: str) -> bytes:
    """A whole document, or an event with one, under this name."""
    usual = _USUAL.match(data)
    if usual is not None:
        return b"%b%b%b" % (data[: usual.start(1) - 1], orjson.dumps(name), data[usual.end(1) + 1 :])
    return Renaming(name).feed(data) if b'"model"' in data else data
