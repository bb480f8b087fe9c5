"""Server-sent events as bytes: where one ends, and what it carries. Sans-I/O.

The rule: what comes out is what went in. ``Splitter`` cuts only at the blank line that ends an event
(WHATWG HTML, section 9.2.5), changes nothing, and holds back an event until its last byte is there, so a
reader behind it never sees half of one, however the network cut the stream.
"""

from __future__ import annotations

import re

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_IS_ERROR = re.compile(rb"(?:\A|[\r\n])event: ?error(?:[\r\n]|\Z)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_OVERLAP = 3  # a blank line is at most CR LF CR LF: its first three bytes may be in what is held


class EventTooLongError(Exception):
    """An event grew past the bound without ending."""


class Splitter:
    """Cuts a byte stream into runs of whole events.

    ``limit`` bounds, in bytes, what is held back: the beginning of one event that has not ended yet.
    """

    __slots__ = ("_limit", "held")

    def __init__(self, limit: int) -> None:
        self.held = bytearray()
        """What waits of an event that is not whole; always the same object."""
        self._limit = limit

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return every event they complete, as they came, or ``b""``.

        Raises EventTooLongError when an unfinished event outgrows the limit.
        """
        if not self.held and data.endswith(b"\n\n"):
            return data  # the ordinary case: the read ends where an event ends
        start = max(len(self.held) - _OVERLAP, 0)
        self.held += data
        end = _last_end(self.held, start)
        whole = bytes(self.held[:end])
        del self.held[:end]
        if len(self.held) > self._limit:
            raise EventTooLongError(f"an event is longer than {self._limit} bytes")
        return whole

    def take(self) -> bytes:
        """What is held, handed over: the stream has ended and its last event will not be completed."""
        rest = bytes(self.held)
        self.held.clear()
        return rest


def _last_end(buffer: bytearray, start: int) -> int:
    """The index behind the last blank line at or after ``start``; 0 when there is none."""
    if buffer.find(b"\r", start) < 0:  # no JSON text holds a raw CR, so this is every vLLM stream
        end = buffer.rfind(b"\n\n", start)
        return end + 2 if end >= 0 else 0
    end = 0
    for match in _BLANK_LINE.finditer(buffer, start):
        end = match.end()
    return end


def split(block: bytes) -> list[bytes]:
    """Cut a run of whole events into single ones, each with its blank line; joined they are ``block`` again."""
    events, start = [], 0
    for match in _BLANK_LINE.finditer(block):
        events.append(block[start : match.end()])
        start = match.end()
    if start < len(block):
        events.append(block[start:])
    return events


def data_of(event: bytes) -> bytes:
    """The event's data: its ``data:`` lines joined by LF; ``b""`` for a comment or an event without data."""
    lines = (line for line in _LINE_END.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[6:] if line[5:6] == b" " else line[5:] for line in lines)


def is_error(event: bytes) -> bool:
    """Whether the event's name is ``error``."""
    return _IS_ERROR.search(event) is not None
