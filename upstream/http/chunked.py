"""Bodies in chunks (RFC 9112, section 7.1), of clients and of servers. Sans-I/O.

The rule: the result depends on the bytes alone, not on how they are cut into reads. The decoder knows where the body ends, so bytes after
it are never read as a part of it. Every line of the framing is compared as a whole with the grammar. Nothing outside the grammar is
accepted, because another reader could read it in another way.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from enum import Enum, auto

FRAMING_PER_BYTE = 8
"""Allowed framing bytes for each byte of a body: a chunk of one byte has five. Longer framing, with extensions, counts as excess."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;%b(?:=(?:%b|%b))?)*\r\n" % (_TOKEN, _TOKEN, _QUOTED))
_TRAILER_LINE = re.compile(rb"%b:[\t -~\x80-\xff]*\r\n" % _TOKEN)
_LINE_END = b"\r\n"
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})  # no trailers (RFC 9110, section 6.5.1)


class ChunkedError(ValueError):
    """The bytes are not a chunked body."""


class FramingTooLargeError(ValueError):
    """The framing, with extensions and trailers, is larger than its limit."""


class Expects(Enum):
    """The part of the framing that comes next."""

    SIZE = auto()
    """The line before a chunk: its size and extensions."""
    CHUNK_END = auto()
    """The line end after a chunk."""
    TRAILER = auto()
    """A trailer, or the empty line that ends the body."""


# Module names of our own: looking up an enum's member costs a call with CPython 3.11.
_SIZE, _CHUNK_END, _TRAILER = Expects.SIZE, Expects.CHUNK_END, Expects.TRAILER


class ChunkedDecoder:
    """Decodes one body. ``limit``: the bytes of framing that it may have, besides ``FRAMING_PER_BYTE`` for each byte of the body."""

    __slots__ = ("_excess", "_expects", "_left", "_limit", "_line", "between_chunks", "finished")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._excess = 0
        """Framing bytes beyond those that the body allows."""
        self._expects = _SIZE
        self._left = 0
        """Bytes of the current chunk that are still to come."""
        self._line = b""
        """The received part of a line of the framing."""
        self.between_chunks = True
        """The next byte is the first one of a chunk's size."""
        self.finished = False
        """The whole body has been received."""

    def feed(self, data: bytes, at: int, sink: Callable[[bytes], None], most: int = sys.maxsize) -> int:
        """Decode the bytes from ``at`` on, at most ``most`` chunks or lines, and pass the body to ``sink``, at most a piece for each chunk.

        Returns the index of the first byte that was not decoded. Raises ChunkedError and FramingTooLargeError.
        """
        size = len(data)
        while at < size and most and not self.finished:
            most -= 1
            if self.between_chunks:
                found = _SIZE_LINE.match(data, at)
                start = at if found is None else found.end()
                end = start if found is None else start + int(found[1], 16)
                if end > start and data[end : end + 2] == _LINE_END:  # the whole chunk has arrived
                    self._count(start - at)
                    self._count(FRAMING_PER_BYTE * (start - end))
                    self._count(len(_LINE_END))
                    at = end + 2
                    sink(data[start:end])
                    continue
                self.between_chunks = False
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._count(-FRAMING_PER_BYTE * len(piece))
                sink(piece)
                continue
            end = data.find(b"\n", at) + 1
            line = data[at : end or size]
            if self._line:
                line = self._line + line
            at = end or size
            if self._expects is _CHUNK_END and not _LINE_END.startswith(line):
                raise ChunkedError("a chunk is longer than its size")
            self._count(len(line))
            if end:
                self._line = b""
                self._read_line(line)
            else:
                self._count(-len(line))  # it is counted when it is complete
                self._line = line
        return at

    def _count(self, framing: int) -> None:
        """Count bytes of framing; a body's bytes make up for some of them. Raises FramingTooLargeError."""
        excess = self._excess + framing
        self._excess = excess if excess > 0 else 0
        if excess > self._limit:
            raise FramingTooLargeError(f"the framing of the body is larger than {self._limit} bytes")

    def _read_line(self, line: bytes) -> None:
        """Read a whole line of the framing."""
        if self._expects is _SIZE:
            found = _SIZE_LINE.fullmatch(line)
            if found is None:
                raise ChunkedError("the size of a chunk is not valid")
            self._left = int(found[1], 16)
            self._expects = _CHUNK_END if self._left else _TRAILER
        elif self._expects is _CHUNK_END:
            self._expects, self.between_chunks = _SIZE, True
        elif line == _LINE_END:
            self.finished = True
        elif _TRAILER_LINE.fullmatch(line) is None or line[: line.find(b":")].lower() in _FRAMING:
            raise ChunkedError("a trailer is not valid")
