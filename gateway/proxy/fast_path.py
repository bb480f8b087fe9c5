"""The fast path of an ordinary chunk: from the transport that read it to the transport that sends it, in one function.

vLLM sends an event as one chunk, and one read usually contains one chunk. If a read is exactly one chunk and contains none of the marks of
a field that the gateway acts on, it is sent unchanged, with its frame. Most chunks need no search for the marks: they have the template of
earlier ones (``event_template``). Every other read takes the general path
(``Connection.data_received``, ``UpstreamResponse``, ``EventRelay``). This module repeats the parts of that path that apply: for each event
of each stream, the calls and attributes between those objects cost more than the work (docs/performance.md).

The rule: a chunk takes the fast path only between two chunks that the parser has read completely, and only if the general path would do
the same with it. ``EventRelay._forward`` has the same accounting (time, gaps, bytes, running usage); tests/gateway/proxy/test_fast_path.py
compares the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from time import monotonic

from gateway.api.response_fields import Marks
from gateway.api.usage import USAGE_START
from gateway.client.request import ClientRequest
from gateway.proxy.event_template import TemplateLearner
from gateway.proxy.running_usage import DIGITS, EVENT_END, RunningUsage
from gateway.telemetry.metrics import CHUNK_GAPS, ReadGaps
from upstream.balancing.attempt import UpstreamResponse
from upstream.http.chunked import ChunkedDecoder
from upstream.http.connection import Connection

_LEAST, _MOST = 64, 2048
"""Bytes of an ordinary chunk with its frame. The last events of streams are shorter, or have a mark."""


def _size_lines() -> tuple[tuple[bytes, int, int], ...]:
    """Return, for each size of a read that is one chunk: its first line, the bytes of that line, and the bytes of the chunk's data.

    For a size that no such read has, the first line is a text that no read starts with.
    """
    lines = [(b"\n", 1, 0)] * _MOST
    for size in range(_LEAST, _MOST):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < _MOST:
            lines[len(line) + size + 2] = line, len(line), size
    return tuple(lines)


_SIZE_LINES = _size_lines()
_BACKSLASH = ord("\\")


def fast_path(
    response: UpstreamResponse,
    request: ClientRequest,
    gaps: ReadGaps,
    held: bytearray,
    write: Callable[[bytes], None],
    marks: Marks,
    connection: Connection,
    chunks: ChunkedDecoder,
) -> Callable[[bytes], None]:
    """Return a function that handles a connection's reads instead of ``data_received`` after the response has started.

    ``held``: the bytes of an incomplete event. ``marks``: bytes that an ordinary chunk does not contain. ``write`` sends framed chunks to
    the client.
    """
    learner = TemplateLearner(frame_end=b"\r\n")

    def read(
        data: bytes,
        # Default values are local variables: they take less time, and a fifth of the memory of variables of the enclosing function.
        chunks: ChunkedDecoder = chunks,
        held: bytearray = held,
        marks: Marks = marks,
        learner: TemplateLearner = learner,
        response: UpstreamResponse = response,
        request: ClientRequest = request,
        gaps: ReadGaps = gaps,
        counts: list[int] = gaps.counts,
        write: Callable[[bytes], None] = write,
        general_path: Callable[[bytes], None] = connection.data_received,
    ) -> None:
        size = len(data)
        if chunks.between_chunks and size < _MOST and not held:
            line, line_size, payload = _SIZE_LINES[size]
            start, end, start_size, end_size = learner.template
            text, quote = line_size + start_size, size - end_size
            # One chunk (comparing a slice takes half the time of ``startswith``), with an event of the template or without marks. ``find``,
            # because ``in`` creates and drops an exception each time.
            if (
                data[:line_size] == line
                and (
                    (
                        data.find(b'"', text) == quote
                        and data.startswith(start, line_size)
                        and data.endswith(end)
                        and data[quote - 1] != _BACKSLASH
                        and data.find(b"\n", text) == size - 4  # one event
                    )
                    or (
                        data.partition(b"\n\n")[2] == b"\r\n"  # one event, not several that a proxy has joined
                        and data.find(marks[0]) < 0
                        and data.find(marks[1]) < 0
                        and data.find(marks[2]) < 0
                        and data.find(marks[3]) < 0
                        and (not learner.attempts or learner.learn(data[line_size:-2]))
                    )
                )
            ):
                now = response.last_byte_at = monotonic()
                counts[bisect_left(CHUNK_GAPS, now - gaps.last)] += 1
                gaps.last = now
                request.bytes_out += payload
                write(data)
                return
        general_path(data)

    return read


def counting_fast_path(
    running: RunningUsage,
    response: UpstreamResponse,
    request: ClientRequest,
    gaps: ReadGaps,
    held: bytearray,
    write: Callable[[bytes], None],
    marks: Marks,
    connection: Connection,
    chunks: ChunkedDecoder,
) -> Callable[[bytes], None]:
    """Do the same as ``fast_path`` for a stream whose running usage is hidden from the client.

    An ordinary chunk ends with a usage of the known shape, and only its digits differ. It is sent without the usage, in a frame of the new
    size. The bytes after USAGE_START are stored, and are parsed only if the stream is truncated.
    """
    learner = TemplateLearner(EVENT_END)

    def read(
        data: bytes,
        # As above.
        chunks: ChunkedDecoder = chunks,
        held: bytearray = held,
        marks: Marks = marks,
        learner: TemplateLearner = learner,
        running: RunningUsage = running,
        shape: bytes | None = running.shape,
        response: UpstreamResponse = response,
        request: ClientRequest = request,
        gaps: ReadGaps = gaps,
        counts: list[int] = gaps.counts,
        write: Callable[[bytes], None] = write,
        general_path: Callable[[bytes], None] = connection.data_received,
    ) -> None:
        size = len(data)
        if chunks.between_chunks and size < _MOST and not held:
            line, line_size, _ = _SIZE_LINES[size]
            start, end, start_size, end_size = learner.template
            before, _, tail = data.rpartition(USAGE_START)
            text, quote = line_size + start_size, len(before) - end_size
            if (
                tail.translate(None, DIGITS) == shape  # the usage is the last field of the last event
                and data[:line_size] == line
                and (
                    (
                        before.find(b'"', text) == quote
                        and before.startswith(start, line_size)
                        and before.endswith(end)
                        and before[quote - 1] != _BACKSLASH
                        and before.find(b"\n", text) < 0  # one event
                    )
                    or (
                        before.find(b"\n\n") < 0  # one event
                        and before.find(marks[1]) < 0
                        and before.find(marks[2]) < 0
                        and before.find(marks[3]) < 0
                        and (not learner.attempts or learner.learn(before[line_size:]))
                    )
                )
            ):
                now = response.last_byte_at = monotonic()
                counts[bisect_left(CHUNK_GAPS, now - gaps.last)] += 1
                gaps.last = now
                running.tail = tail
                event = before[line_size:] + EVENT_END
                payload = len(event)
                request.bytes_out += payload
                write(b"%x\r\n%b\r\n" % (payload, event))
                return
        general_path(data)

    return read
