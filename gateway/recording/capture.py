"""Collect what one recorded request receives and is sent.

The rule: a capture stores references and times, and does nothing else while the request is served. Bytes of the response are taken where
they are written to the client, after the fast path and all that changes events. So they are what the client got, framing included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from gateway.telemetry.request_record import RequestRecord

RECORD_LIMIT = 8 * 1024 * 1024
"""Bytes of one record, before redaction and encryption."""

_PIECE_OVERHEAD = 160  # bytes that Python needs for a piece in addition to its data


class SentBody(Protocol):
    """A body that servers get."""

    def encode(self, served_model: str) -> bytes:
        """Return the bytes for a server that knows the model by this name."""


class Memory:
    """The bytes of all captures of a worker that have not been stored yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Reserve bytes. Returns False if they are used up."""
        if self.used + size > self._limit:
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Release reserved bytes."""
        self.used -= size


@dataclass(eq=False)
class Capture:
    """One recorded request. Times are ``time.monotonic``.

    ``drop`` is called with the result when the record cannot be kept, and ``finished`` when it is complete. Either is called once.
    """

    path: str
    received_at: float
    received: bytes | bytearray
    sent: SentBody | None
    _memory: Memory
    _drop: Callable[[str], None]
    _finished: Callable[[Capture], None]
    pieces: list[tuple[float, Any]] = field(default_factory=list)
    """The bytes that were written to the client, with their times."""
    record: RequestRecord | None = None
    served_model: str | None = None
    """The name of the model at the last server; None if no server was tried."""
    is_event_stream: bool = False
    size: int = 0
    _is_dropped: bool = False

    def hold(self, size: int) -> bool:
        """Count bytes of the record. Returns False if the record is dropped, because it or all of them together are too large."""
        if self._is_dropped:
            return False
        if self.size + size > RECORD_LIMIT:
            self._end("too_large")
        elif not self._memory.reserve(size):
            self._end("no_memory")
        else:
            self.size += size
        return not self._is_dropped

    def write(self, data: Any) -> None:
        """Store bytes that are written to the client."""
        if self.hold(len(data) + _PIECE_OVERHEAD):
            self.pieces.append((monotonic(), data))

    def finish(self, record: RequestRecord, served_model: str | None, *, is_event_stream: bool) -> None:
        """Complete the capture: the request has ended."""
        if not self._is_dropped:
            self.record, self.served_model, self.is_event_stream = record, served_model, is_event_stream
            self._finished(self)

    def _end(self, result: str) -> None:
        self._is_dropped = True
        self._memory.release(self.size)
        self.received, self.sent, self.size = b"", None, 0
        self.pieces.clear()
        self._drop(result)
