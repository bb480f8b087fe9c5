"""Another value for the member ``model`` of a response, and every other byte as it was. Sans-I/O.

The rule: only the value of the document's own ``model`` is replaced, or of that in its ``response`` or ``message``, where
OpenAI's and Anthropic's streams have it; one deeper down, or the same text inside a string, is data. Nothing is held back but the
value itself, so JSON text of any length passes in pieces of any size.
"""

from __future__ import annotations

import re

import orjson

from gateway.api.json_scan import Scanner, Wanted

_BEGINNING = re.compile(rb'["{\[]')  # of a document, which the field names of an event may precede
_USUAL = re.compile(rb'(?:data: )?\{(?:"(?:id|object|created)":(?:"[^"\\]*"|\d+),)*"model":"([^"\\]*)"')  # how vLLM's responses begin
_MODEL: Wanted = {"model": None}
_WANTED: Wanted = {"model": None, "response": _MODEL, "message": _MODEL}


class Renaming:
    """Replaces the name in one document. An event of a stream may be fed as it is."""

    __slots__ = ("_done", "_has_begun", "_name", "_replaces", "_scanner")

    def __init__(self, name: str) -> None:
        self._name = orjson.dumps(name)
        self._scanner = Scanner(_WANTED)
        self._has_begun = False
        self._replaces = False  # the value that is being read is the name
        self._done = False

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the document, with the name replaced."""
        if self._done:
            return data
        if self._has_begun:
            return self._renamed(data)
        beginning = _BEGINNING.search(data)
        if beginning is None:
            return data
        self._has_begun = True
        return data[: beginning.start()] + self._renamed(data[beginning.start() :])

    def _renamed(self, data: bytes) -> bytes:
        out, stored = [], 0
        for _, start, end, is_last in self._scanner.feed(data):
            self._replaces = self._replaces or data[start : start + 1] == b'"'
            if self._replaces and not self._done:
                out.append(data[stored:start] + (self._name if is_last else b""))
                stored = end
                self._done = is_last
        self._done = self._done or self._scanner.finished
        out.append(data[stored:])
        return b"".join(out)


def renamed(data: bytes, name: str) -> bytes:
    """A whole document, or an event with one, under this name."""
    usual = _USUAL.match(data)
    if usual is not None:
        return b"%b%b%b" % (data[: usual.start(1) - 1], orjson.dumps(name), data[usual.end(1) + 1 :])
    return Renaming(name).feed(data) if b'"model"' in data or b"\\u00" in data else data
