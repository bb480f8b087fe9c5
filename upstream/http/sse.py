"""Server-sent events as bytes: their ends and their data. Sans-I/O.

The rule: the output is the input. ``Splitter`` cuts only at the blank line that ends an event (WHATWG HTML, section 9.2.5), changes
nothing, and holds an event until its last byte has arrived. A reader never sees a part of an event, however the network cut the stream.
"""

from __future__ import annotations

import re

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_IS_ERROR = re.compile(rb"(?:\A|[\r\n])event: ?error(?:[\r\n]|\Z)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_OVERLAP = 3  # a blank line is at most CR LF CR LF, so its first three bytes may be in the held part


class EventTooLongError(Exception):
    """An event exceeded the limit before its end."""


class Splitter:
    """Cuts a byte stream into runs of complete events. ``limit``: bytes of an incomplete event that may be held."""

    __slots__ = ("_limit", "held")

    def __init__(self, limit: int) -> None:
        self.held = bytearray()
        """The received part of an incomplete event; always the same object."""
        self._limit = limit

    def feed(self, data: bytes) -> bytes:
        """Add bytes, and return the events that they complete, unchanged, or ``b""``.

        Raises EventTooLongError if an incomplete event exceeds the limit.
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
        """Return the held part and forget it: the stream has ended, and its last event stays incomplete."""
        rest = bytes(self.held)
        self.held.clear()
        return rest


def _last_end(buffer: bytearray, start: int) -> int:
    """Return the index after the last blank line at or after ``start``, or 0."""
    if buffer.find(b"\r", start) < 0:  # JSON text contains no raw CR, so this is the case for every vLLM stream
        end = buffer.rfind(b"\n\n", start)
        return end + 2 if end >= 0 else 0
    end = 0
    for match in _BLANK_LINE.finditer(buffer, start):
        end = match.end()
    return end


def split(block: bytes) -> list[bytes]:
    """Split a run of complete events into single events, each with its blank line. Joined they equal ``block``."""
    events, start = [], 0
    for match in _BLANK_LINE.finditer(block):
        events.append(block[start : match.end()])
        start = match.end()
    if start < len(block):
        events.append(block[start:])
    return events


def data_of(event: bytes) -> bytes:
    """Return the event's ``data:`` lines, joined by LF; ``b""`` for a comment or an event without data."""
    lines = (line for line in _LINE_END.split(event) if line.startswith(b"data:"))
    return b"\n".join(line[6:] if line[5:6] == b" " else line[5:] for line in lines)


def is_error(event: bytes) -> bool:
    """Return whether the event's name is ``error``."""
    return _IS_ERROR.search(event) is not None
