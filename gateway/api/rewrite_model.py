"""Replaces the model's name in a response; every other byte stays. Sans-I/O.

The rule: only the value of the document's own ``model`` field is replaced, or of the ``model`` field in its ``response`` or ``message``
(its position in OpenAI's and Anthropic's streams). A field that is nested more deeply, or the same text inside a string, is data. Only the
value itself is held back, so JSON text of any length passes in pieces of any size.
"""

from __future__ import annotations

import re

import orjson

from gateway.api.json_scan import Scanner, Wanted

_START = re.compile(rb'["{\[]')  # of a document; the field names of an event may precede it
_USUAL = re.compile(rb'(?:data: )?\{(?:"(?:id|object|created)":(?:"[^"\\]*"|\d+),)*"model":"([^"\\]*)"')  # how vLLM's responses start
_MODEL: Wanted = {"model": None}
_WANTED: Wanted = {"model": None, "response": _MODEL, "message": _MODEL}


class ModelRenamer:
    """Replaces the model's name in one document. An event of a stream may be fed unchanged."""

    __slots__ = ("_done", "_has_started", "_name", "_replaces", "_scanner")

    def __init__(self, name: str) -> None:
        self._name = orjson.dumps(name)
        self._scanner = Scanner(_WANTED)
        self._has_started = False
        self._replaces = False  # the current value is the name
        self._done = False

    def feed(self, data: bytes) -> bytes:
        """Return the next bytes of the document, with the name replaced."""
        if self._done:
            return data
        if self._has_started:
            return self._renamed(data)
        if (start := _START.search(data)) is None:
            return data
        self._has_started = True
        return data[: start.start()] + self._renamed(data[start.start() :])

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
    """Return a whole document, or an event that contains one, with this name."""
    if (usual := _USUAL.match(data)) is not None:
        return b"%b%b%b" % (data[: usual.start(1) - 1], orjson.dumps(name), data[usual.end(1) + 1 :])
    return ModelRenamer(name).feed(data) if b'"model"' in data or b"\\u00" in data else data
