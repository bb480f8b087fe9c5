"""The short way of an ordinary chunk: from the transport that read it to the one that sends it, in one function.

vLLM sends an event as one chunk, and one read mostly brings one chunk. Where it is exactly that, and nothing in it is to be
looked at, it goes on as it came, frame and all. Everything else goes the long way (``Connection.data_received``, ``Answer``,
``EventRelay``), of which this is an excerpt, written out: for each event of each stream the calls from one to the other, and
the attributes in which they keep things, cost more than all that is done (docs/performance.md).

The rule: a chunk passes here only between two chunks that the parser has read whole, and only if the long way would do with
it what is done here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from time import monotonic

from gateway.api.response_fields import Marks
from gateway.client.request import ClientRequest
from gateway.telemetry.metrics import CHUNK_GAPS, ReadGaps
from upstream.balancing.attempt import Answer
from upstream.http.connection import Connection

_LEAST, _MOST = 64, 2048
"""Bytes of an ordinary chunk with its frame. Whatever ends a stream is shorter, or is looked at."""


def _size_lines() -> tuple[tuple[bytes, int, int], ...]:
    """By the bytes of a read: how it begins if it is one whole chunk, the bytes of that line, and those of the chunk's data. No read
    begins with what stands where none has this length."""
    lines = [(b"\n", 1, 0)] * _MOST
    for size in range(_LEAST, _MOST):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < _MOST:
            lines[len(line) + size + 2] = line, len(line), size
    return tuple(lines)


_SIZE_LINES = _size_lines()


def lane(
    answer: Answer,
    call: ClientRequest,
    gaps: ReadGaps,
    held: bytearray,
    write: Callable[[bytes], None],
    marks: Marks,
    connection: Connection,
) -> Callable[[bytes], None]:
    """What reads a connection in place of its ``data_received``, once the answer has begun.

    ``held``: what waits of an event that is not whole; ``marks``: what chunks do not have in them that need no look;
    ``write`` sends framed chunks to the client.
    """
    long_way = connection.data_received
    first, second, third, fourth = marks
    counts, lines, bounds = gaps.counts, _SIZE_LINES, CHUNK_GAPS

    def read(data: bytes) -> None:
        size = len(data)
        if connection.between_chunks and size < _MOST and not held:
            line, begins, payload = lines[size]
            if (
                data[:begins] == line  # ``startswith`` takes twice as long
                and data.partition(b"\n\n")[2] == b"\r\n"  # one whole event, not several that somebody on the way has put together
                and data.find(first) < 0  # ``in`` makes and drops an exception each time
                and data.find(second) < 0
                and data.find(third) < 0
                and data.find(fourth) < 0
            ):
                now = answer.last_byte = monotonic()
                counts[bisect_left(bounds, now - gaps.last)] += 1
                gaps.last = now
                call.bytes_out += payload
                write(data)
                return
        long_way(data)

    return read
