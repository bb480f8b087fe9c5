"""One HTTP/1.1 connection to a server, and the idle connections that wait for the next request.

The rule: a connection carries one exchange at a time. It becomes idle only after a complete response, with no bytes left, reading not
paused and the request sent completely. In any other case it is closed, so that no request can receive bytes of another response.

A status line with its headers is read as a whole (``response_head``), and the body is counted by its length or decoded by one decoder
(``chunked``). So a response depends on its bytes alone, not on how they are cut into reads, nor on earlier responses. The receiver is
called directly: there is no task and no queue between the arrival of a chunk and the client's connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum, auto
from functools import partial
from time import monotonic
from typing import Protocol

from upstream.http.address import Address
from upstream.http.chunked import ChunkedDecoder, ChunkedError, FramingTooLargeError
from upstream.http.errors import BadResponse, ConnectFailed, ConnectTimeout, Disconnected, LocalLimit, StaleConnection, UpstreamError
from upstream.http.repeated_headers import RepeatedHeaders
from upstream.http.response_head import Headers, ResponseHead, ResponseHeadError, may_begin_response, parse_response_head, with_length
from upstream.http.write_batching import BatchingTransport, WriteBatch

MAX_HEADER_BYTES = 384 * 1024
"""Bytes of a status line and its headers, and of the framing of a body. vLLM sends below 1 KiB, but 120 bytes for each of a response's
binary embeddings."""

STALE_WITHIN = 1.0
"""Seconds after a request was sent in which the close of a reused connection counts as the server's idle timeout. Later, the server has
received the request and may have acted on it."""

READ_AHEAD = 32 * 1024
"""Receive buffer of a streaming connection in bytes; the kernel doubles it (socket(7)). By default the buffer grows to megabytes if a
server is faster than its client, and each read copies a quarter of a megabyte into memory, for each slow client. It is set for streams
only: it would slow down a large non-streaming response, especially on a long-distance connection."""

STALL = 0.1
"""Seconds that a process needs after a stall to process the connections that were established meanwhile."""

_CLOSED_AT_ONCE = 256
_HEAD_END = b"\r\n\r\n"
_OUR_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, socket.EAI_SYSTEM, socket.EAI_MEMORY}
)
"""Error numbers that mean that the gateway cannot open more connections."""


def remembered_headers() -> RepeatedHeaders[ResponseHead]:
    """Return a parser of the headers of one server's responses."""
    return RepeatedHeaders(parse_response_head, with_length)


class Receiver(Protocol):
    """The consumer of one response. After ``on_end`` or ``on_failure`` no other method is called."""

    wants_read_events: bool
    """Whether ``on_read`` is called."""

    def on_headers(self, status: int, headers: Headers) -> None:
        """Receive the final status and headers. Interim (1xx) responses are not reported."""

    def on_body(self, data: bytes) -> None:
        """Receive the next bytes of the body, without their framing."""

    def on_read(self) -> None:
        """Handle the end of one read: its bytes were reported, and the response is not complete yet."""

    def on_end(self) -> None:
        """Handle the end of the complete response."""

    def on_failure(self, error: UpstreamError) -> None:
        """Handle a response that will not be complete."""

    def on_writable(self) -> None:
        """Continue to send: enough bytes of the request have left the buffer."""


class Expects(Enum):
    """The part of a response that the next bytes of a connection belong to."""

    RESPONSE = auto()
    """The first bytes of a response. Nothing of it has been received."""
    HEAD = auto()
    """The rest of a status line and headers, or the next ones after an interim response."""
    LENGTH = auto()
    """A body of a known length."""
    CHUNKS = auto()
    """A body in chunks."""
    CLOSE = auto()
    """A body that ends with the connection."""


# Module names of our own: looking up an enum's member costs a call with CPython 3.11.
_RESPONSE, _HEAD = Expects.RESPONSE, Expects.HEAD
_LENGTH, _CHUNKS, _CLOSE = Expects.LENGTH, Expects.CHUNKS, Expects.CLOSE


class Connection(asyncio.Protocol):
    """One connection: idle, busy with one exchange, or closed.

    ``on_idle`` is called with it when it can carry another exchange. ``known``: the remembered headers of the server's responses.
    """

    def __init__(
        self,
        server: str,
        on_idle: Callable[[Connection], None],
        write_batch: WriteBatch,
        known: RepeatedHeaders[ResponseHead] | None = None,
    ) -> None:
        self._server = server
        self._on_idle = on_idle
        self._write_batch = write_batch
        self._headers = known or remembered_headers()
        self._transport: BatchingTransport | None = None
        self._paused = False
        self.write_paused = False
        self.uses = 0
        self._read_ahead_limited = False
        # Per-exchange state
        self._receiver: Receiver | None = None
        self._sent = 0.0
        self._expects = _RESPONSE
        self._held = bytearray()
        """The received part of a status line and headers."""
        self._interim_bytes = 0
        """Bytes of interim responses before this one."""
        self._left = 0
        """Bytes of a body with a length that are still to come."""
        self.chunks: ChunkedDecoder | None = None
        """Decodes the body, if it is chunked."""
        self._keep_alive = False
        self._request_open = False
        self._diverted = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self._receiver else "idle"
        return f"<Connection to {self._server}, {state}, {self.uses} uses>"

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # Called by the exchange

    def send(self, data: bytes, receiver: Receiver, *, more: bool = False, at_once: bool = False) -> None:
        """Start an exchange with these bytes. ``more``: ``send_more`` will follow. ``at_once``: do not wait for the writes of others."""
        assert self._receiver is None and self._transport is not None
        self._receiver, self._expects = receiver, _RESPONSE
        self._request_open = more
        self._sent = monotonic()
        self.uses += 1
        if at_once:
            self._transport.write_at_once(data)
        else:
            self._transport.write(data)

    def send_more(self, data: bytes, *, more: bool) -> None:
        """Send the next bytes of the request. ``more``: further calls will follow."""
        self._request_open = more
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def limit_read_ahead(self) -> None:
        """Limit the bytes that the server can send ahead of the reader to ``READ_AHEAD``."""
        if not self._read_ahead_limited and self._transport is not None:
            self._read_ahead_limited = True
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_AHEAD)

    def divert_reads(self, reader: Callable[[bytes], None]) -> None:
        """Send the read bytes to ``reader`` instead of ``data_received`` until the exchange ends. The reader may pass bytes on to it.

        The reader may withhold only complete chunks from the decoder, and only while it is ``between_chunks``: its state stays the same.
        """
        if self._transport is not None:
            self._diverted = True
            self._transport.set_protocol(_DivertedReads(self, reader))

    def _stop_diverting(self) -> None:
        self._diverted = False
        if self._transport is not None:
            self._transport.set_protocol(self)

    def close(self) -> None:
        """Close both directions immediately: vLLM treats a half-close as a disconnect."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = BatchingTransport(transport, self._write_batch)  # type: ignore[arg-type]  # both loops give a full Transport here

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.close()  # bytes without a request: this connection cannot be trusted
            return
        try:
            begins = self._expects is _RESPONSE or self._expects is _HEAD
            body = self._read_head(data, receiver) if begins else data
            is_complete = body is not None and self._read_body(body, receiver)
        except (ResponseHeadError, ChunkedError, FramingTooLargeError) as error:
            self._fail(BadResponse(self._server, str(error)))
            return
        if self._receiver is not receiver:
            return  # it has closed the connection
        if is_complete:
            self._finish()
        elif receiver.wants_read_events:
            receiver.on_read()

    def _read_head(self, data: bytes, receiver: Receiver) -> bytes | None:
        """Read a status line and headers, after interim responses (1xx). Returns the bytes after them.

        If the headers are not complete, the bytes are stored. Returns None then. Raises ResponseHeadError.
        """
        self._expects = _HEAD
        if self._held:
            data = self._take_held(data)
        start = 0
        while (found := data.find(_HEAD_END, start)) >= 0:
            end = found + 4
            if self._interim_bytes + end > MAX_HEADER_BYTES:
                break
            head = self._headers.parse(data[start:end])
            if head.status >= 200:
                self._interim_bytes, self._keep_alive = 0, head.keep_alive
                if head.chunked:
                    self._expects, self.chunks = _CHUNKS, ChunkedDecoder(MAX_HEADER_BYTES)
                elif head.length is not None:
                    self._expects, self._left = _LENGTH, head.length
                else:
                    self._expects = _CLOSE
                receiver.on_headers(head.status, head.headers)
                return data[end:]
            start = end
        self._interim_bytes += start
        if start < len(data):
            self._held += data[start:]
            self._check_held()
        return None

    def _take_held(self, data: bytes) -> bytes:
        """Return the stored bytes with these ones if they contain the end of the headers, otherwise nothing. Raises ResponseHeadError."""
        held = self._held
        held += data
        if held.find(_HEAD_END, max(len(held) - len(data) - len(_HEAD_END) + 1, 0)) < 0:
            self._check_held()
            return b""
        self._held = bytearray()
        return bytes(held)

    def _check_held(self) -> None:
        """Check an incomplete status line with headers. Raises ResponseHeadError."""
        if not may_begin_response(self._held):
            raise ResponseHeadError("not HTTP/1.1")
        if self._interim_bytes + len(self._held) > MAX_HEADER_BYTES:
            raise ResponseHeadError(f"more than {MAX_HEADER_BYTES} bytes of headers")

    def _read_body(self, data: bytes, receiver: Receiver) -> bool:
        """Pass on the next bytes of a body. Returns whether it is complete. Raises ChunkedError and FramingTooLargeError."""
        if self._expects is _LENGTH:
            piece = data[: self._left]
            end = len(piece)
            self._left -= end
            if piece:
                receiver.on_body(piece)
            is_complete = not self._left
        elif self.chunks is not None:
            end = self.chunks.feed(data, 0, receiver.on_body)
            is_complete = self.chunks.finished
        else:
            receiver.on_body(data)
            return False
        if is_complete and end < len(data):
            self._keep_alive = False  # bytes without a request: this connection cannot be trusted
        return is_complete

    def eof_received(self) -> None:
        return None  # closes the transport; connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport.mark_closed()
        self._transport = None
        if self._diverted:
            self._stop_diverting()
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if exc is None and self._expects is _CLOSE:
            receiver.on_end()  # a body without a length ends with the connection (RFC 9112, section 6.3)
        elif self.uses > 1 and self._expects is _RESPONSE and monotonic() - self._sent < STALE_WITHIN:
            receiver.on_failure(StaleConnection(self._server, "closed an idle connection as it was used again"))
        else:
            receiver.on_failure(
                Disconnected(self._server, f"closed the connection {'before' if self._expects is _RESPONSE else 'in'} its response")
            )

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._receiver is not None:
            self._receiver.on_writable()

    def _finish(self) -> None:
        """End the exchange after a complete response, and make the connection idle if it can carry another one."""
        receiver, self._receiver = self._receiver, None
        self.chunks = None
        if self._diverted:
            self._stop_diverting()
        if self._request_open or self.write_paused or not self._keep_alive or self._transport is None or self._transport.is_closing():
            self.close()
        else:
            if self._paused:
                self.resume_reading()
            self._on_idle(self)
        if receiver is not None:
            receiver.on_end()

    def _fail(self, error: UpstreamError) -> None:
        receiver = self._receiver
        self.close()
        if receiver is not None:
            receiver.on_failure(error)


class _DivertedReads(asyncio.Protocol):
    """The protocol of a connection's transport while the read bytes go to a reader."""

    __slots__ = ("_connection", "data_received")

    def __init__(self, connection: Connection, reader: Callable[[bytes], None]) -> None:
        self._connection = connection
        self.data_received = reader  # type: ignore[method-assign,assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    def eof_received(self) -> None:
        return None  # as in Connection

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


async def connect(
    server: str,
    address: Address,
    timeout: float,
    tls: ssl.SSLContext | None,
    on_idle: Callable[[Connection], None],
    write_batch: WriteBatch,
    known: RepeatedHeaders[ResponseHead] | None = None,
) -> Connection:
    """Open a connection.

    Raises ConnectTimeout after ``timeout`` seconds and a moment, LocalLimit if the gateway cannot open more connections, and ConnectFailed
    for every other failure.
    """
    loop, make = asyncio.get_running_loop(), partial(Connection, server, on_idle, write_batch, known)
    try:
        async with _connect_timeout(timeout):
            if address.uds:
                _, connection = await loop.create_unix_connection(make, address.uds)
            else:
                _, connection = await loop.create_connection(make, address.host, address.port, ssl=tls)
    except TimeoutError:
        raise ConnectTimeout(server, f"did not accept a connection within {timeout:g} s") from None
    except (OSError, UnicodeError) as error:  # refused, no such socket, unknown or invalid name, TLS refused (ssl.SSLError)
        kind = LocalLimit if isinstance(error, OSError) and error.errno in _OUR_LIMITS else ConnectFailed
        raise kind(server, f"{type(error).__name__}: {error}") from error
    return connection


@asynccontextmanager
async def _connect_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError a moment after ``seconds``.

    A connection may have been established in time while this process was stalled. It is then processed in the following iterations.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + STALL))
        try:
            yield
        finally:
            timer.cancel()


def _since(entry: tuple[float, Connection]) -> float:
    return entry[0]


class IdleConnections:
    """The idle connections to one server, a stack: the longest idle one is the first.

    ``max_idle``: seconds that a connection may be idle. It is below the server's idle timeout, so that the server's close does not coincide
    with a request.
    """

    def __init__(self, max_idle: float) -> None:
        self.max_idle = max_idle
        self._idle: list[tuple[float, Connection]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, connection: Connection) -> None:
        """Store a connection, or close it if none may be idle."""
        if self.max_idle:
            self._idle.append((monotonic(), connection))
        else:
            connection.close()

    def pop(self) -> Connection | None:
        """Return the connection that was added last and is still usable, or None."""
        while self._idle:
            since, connection = self._idle.pop()
            if not connection.closed:
                if monotonic() - since < self.max_idle:
                    return connection
                connection.close()
        return None

    def close_expired(self) -> None:
        """Close the connections that were idle for too long, but not more than ``_CLOSED_AT_ONCE``. Called about once a second."""
        limit = monotonic() - self.max_idle
        count = bisect_right(self._idle, limit, hi=min(len(self._idle), _CLOSED_AT_ONCE), key=_since)
        expired, self._idle[:count] = self._idle[:count], []
        for _, connection in expired:
            connection.close()

    def close_all(self) -> None:
        """Close every idle connection."""
        while self._idle:
            self._idle.pop()[1].close()
