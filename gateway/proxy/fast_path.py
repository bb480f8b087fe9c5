"""The fast path of an ordinary chunk: from the transport that read it to the transport that sends it, in one function.

vLLM sends an event as one chunk, and one read usually contains one chunk. If a read is exactly one chunk with the template of an event
that the general path has processed as ordinary (``event_template``), it is sent with its frame, without the running usage that the client
did not request. Every other read takes the general path (``Connection.data_received``, ``UpstreamResponse``, ``EventRelay``). This module
repeats the parts of that path that apply: for each event of each stream, the calls and attributes between those objects cost more than the
work (docs/performance.md).

The rule: a chunk takes the fast path only between two chunks that the decoder has read completely, and only if the general path would do
the same with it. ``EventRelay._forward`` has the same accounting (time, gaps, bytes, running usage); tests/gateway/proxy/test_fast_path.py
compares the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from time import monotonic

from gateway.api.usage import USAGE_START
from gateway.client.request import ClientRequest
from gateway.proxy.event_template import EVENT_END, TEXT, TemplateLearner
from gateway.proxy.running_usage import RunningUsage
from gateway.telemetry.metrics import CHUNK_GAPS, ReadGaps
from upstream.balancing.attempt import UpstreamResponse
from upstream.http.chunked import ChunkedDecoder
from upstream.http.connection import Connection

_LEAST, _MOST = 64, 2048
"""Bytes of an ordinary chunk with its frame. The last events of streams are shorter."""


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
_match_text = TEXT.match
_USAGE_START_SIZE = len(USAGE_START)


class FastPath:
    """Handles a connection's reads instead of its ``data_received`` after the response has started.

    ``held``: the bytes of an incomplete event. ``write`` sends framed chunks to the client. ``running``: the running usage of a stream that
    has one.
    """

    __slots__ = ("_chunks", "_gaps", "_general_path", "_held", "_learner", "_request", "_response", "_running", "_write")
    _chunks: ChunkedDecoder
    _general_path: Callable[[bytes], None]

    def __init__(
        self,
        response: UpstreamResponse,
        request: ClientRequest,
        gaps: ReadGaps,
        held: bytearray,
        write: Callable[[bytes], None],
        learner: TemplateLearner,
        running: RunningUsage | None,
    ) -> None:
        self._response: UpstreamResponse = response
        self._request: ClientRequest = request
        self._gaps: ReadGaps = gaps
        self._held: bytearray = held
        self._write: Callable[[bytes], None] = write
        self._learner: TemplateLearner = learner
        self._running: RunningUsage | None = running

    def reader(self, connection: Connection, chunks: ChunkedDecoder) -> Callable[[bytes], None]:
        """Return the function that handles the reads of this connection."""
        self._chunks, self._general_path = chunks, connection.data_received
        return self.read

    def read(self, data: bytes) -> None:
        """Send a read that is one ordinary chunk. Pass every other read to the general path."""
        size = len(data)
        if size >= _MOST or self._held or not self._chunks.between_chunks:
            return self._general_path(data)
        # The size of one chunk, and the template up to the text. Comparing slices takes half the time of ``startswith``.
        line, line_size, payload = _SIZE_LINES[size]
        start, end, numbers, hidden, start_size, end_size = self._learner.template
        text_start = line_size + start_size
        if data[:text_start] != line + start:
            return self._general_path(data)
        # The text, and the template after it, up to the end of the read.
        text = _match_text(data, text_start)
        if text is None:
            return self._general_path(data)
        quote = text.end() - 1
        behind = quote + end_size
        if data[quote:behind] != end or (behind != size if numbers is None else numbers.fullmatch(data, behind) is None):
            return self._general_path(data)
        # The accounting of a read, as in ``EventRelay._forward``.
        now = self._response.last_byte_at = monotonic()
        gaps = self._gaps
        gaps.counts[bisect_left(CHUNK_GAPS, now - gaps.last)] += 1
        gaps.last = now
        if hidden >= 0 and self._running is not None:
            usage = quote + hidden
            self._running.tail = data[usage + _USAGE_START_SIZE :]
            data = data[line_size:usage] + EVENT_END
            payload = len(data)
            data = b"%x\r\n%b\r\n" % (payload, data)
        self._request.bytes_out += payload
        return self._write(data)
