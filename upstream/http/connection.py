"""One HTTP/1.1 connection to a server, and the idle connections that wait for the next request.

The rule: a connection carries one exchange at a time. It becomes idle only after a complete response, with no bytes left, reading not
paused and the request sent completely. In any other case it is closed, so that no request can receive bytes of another response.

llhttp (httptools) parses the bytes in its strict mode. Its callbacks call the receiver directly: there is no task and no queue between the
arrival of a chunk and the client's connection.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol

import httptools

from upstream.http.address import Address
from upstream.http.errors import BadResponse, ConnectFailed, ConnectTimeout, Disconnected, LocalLimit, StaleConnection, UpstreamError
from upstream.http.write_batching import BatchingTransport, WriteBatch

MAX_HEADER_BYTES = 384 * 1024
"""Bytes of a status line and its headers. vLLM sends below 1 KiB, but 120 bytes for each of a response's binary embeddings."""

STALE_WITHIN = 1.0
"""Seconds after a request was sent in which the close of a reused connection counts as the server's idle timeout. Later, the server has
received the request and may have acted on it."""

READ_AHEAD = 32 * 1024
"""Receive buffer of a streaming connection in bytes; the kernel doubles it (socket(7)). By default the buffer grows to megabytes if a
server is faster than its client, and each read copies a quarter of a megabyte into memory, for each slow client. It is set for streams
only: it would slow down a large non-streaming response, especially on a long-distance connection."""

STALL = 0.1
"""Seconds that a process needs after a stall to process the connections that were established meanwhile."""

EVENT_END = b"\n\n\r\n"
"""The last bytes of a chunk that ends with an event. If the parsed bytes end with them, they end after a chunk and not after the size line
of the next chunk, which the parser reports only with the first byte of that chunk."""

_CLOSED_AT_ONCE = 256
_OK = 200
_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_MAX_REPEATABLE = 2048  # bytes of a status line and headers that are remembered
_MAX_DIGITS = 15  # of a Content-Length in a repeated response: httptools checks longer ones
_RELEARN = 1.0  # seconds until other headers are remembered, if the remembered ones have not been repeated
_VERSIONS = frozenset({"1.1", "1.0"})
_OUR_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, socket.EAI_SYSTEM, socket.EAI_MEMORY}
)
"""Error numbers that mean that the gateway cannot open more connections."""

Headers = dict[bytes, bytes]
"""The headers of a response by lower-case name; if a header is repeated, the first value."""


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


class _Repeatable(NamedTuple):
    """Headers of a response: their bytes before, in and after the digits of the Content-Length, and the parsed ones."""

    before: bytes
    digits: bytes
    after: bytes
    headers: Headers


class Connection(asyncio.Protocol):
    """One connection: idle, busy with one exchange, or closed. ``on_idle`` is called with it when it can carry another exchange."""

    def __init__(self, server: str, on_idle: Callable[[Connection], None], write_batch: WriteBatch) -> None:
        self._server = server
        self._on_idle = on_idle
        self._write_batch = write_batch
        self._transport: BatchingTransport | None = None
        self._headers: Headers = {}
        self.on_header = self._headers.setdefault  # called by the parser; a method here would take six times as long
        self._parser: Any = httptools.HttpResponseParser(self)
        self._paused = False
        self.write_paused = False
        self.uses = 0
        self._read_ahead_limited = False
        self._repeatable: _Repeatable | None = None
        """The headers of an earlier response, which may be repeated."""
        self._learn_at = 0.0
        # Per-exchange state
        self._receiver: Receiver | None = None
        self._sent = 0.0
        self._header_bytes = 0  # bytes since the last body byte: status line and headers, or framing and trailers
        self._response_started = False
        self._in_body = False
        self._framed = False
        self._keep_alive = False
        self._complete = False
        self.between_chunks = False
        """The parser is at the end of a chunk that ended with an event."""
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
        self._receiver = receiver
        self._response_started = False
        self._header_bytes = 0
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

        The reader may withhold only complete chunks from the parser, and only while ``between_chunks``: they do not change its state.
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
        is_first = not self._response_started
        if is_first and self._repeatable is not None and self._receive_repeated(data, self._repeatable, receiver):
            return
        self._response_started = True
        self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__  # the exception that a callback raised
            self._fail(cause if isinstance(cause, BadResponse) else BadResponse(self._server, f"not HTTP/1.1: {error}"))
            return
        if self.between_chunks and data[-4:] != EVENT_END:
            self.between_chunks = False
        if self._complete:
            if is_first and self._sent >= self._learn_at:
                self._remember(data)
            self._finish()
        elif self._header_bytes > MAX_HEADER_BYTES:
            self._fail(BadResponse(self._server, f"more than {MAX_HEADER_BYTES} bytes of headers"))
        elif receiver.wants_read_events and receiver is self._receiver:
            receiver.on_read()

    # Repeated responses

    def _remember(self, data: bytes) -> None:
        """Remember the headers of a read that was exactly one successful response with a Content-Length."""
        self._learn_at = self._sent + _RELEARN
        end = data.find(_HEAD_END) + len(_HEAD_END)
        length = _CONTENT_LENGTH.search(data, 0, end)
        status = self._parser.get_status_code()
        if status == _OK and self._keep_alive and end <= _MAX_REPEATABLE and length is not None and end + int(length[1]) == len(data):
            headers = self._headers.copy()
            if b"content-length" in headers and b"content-type" in headers and not self._is_chunked(headers):
                self._repeatable = _Repeatable(data[: length.start(1)], length[1], data[length.end(1) : end], headers)

    def _receive_repeated(self, data: bytes, repeatable: _Repeatable, receiver: Receiver) -> bool:
        """Receive a read that is exactly one response with the remembered headers, except for the Content-Length.

        A server's responses within one second usually have the same headers. httptools has accepted these bytes in the same state, between
        two responses, so its result is known. It is not fed, which saves a callback for each header. Returns False for other reads.
        """
        before, known, after, headers = repeatable
        if not data.startswith(before):
            return False
        end = data.find(b"\r", len(before))
        digits, body = data[len(before) : end], data[end + len(after) :]
        if not (digits.isdigit() and len(digits) <= _MAX_DIGITS and data.startswith(after, end) and int(digits) == len(body)):
            return False
        self._response_started = self._keep_alive = True
        self._learn_at = 0.0  # the next headers, with the next second, will probably be repeated too
        receiver.on_headers(_OK, headers if digits == known else {**headers, b"content-length": digits})
        if body:
            receiver.on_body(body)
        self._finish()
        return True

    def eof_received(self) -> None:
        return None  # closes the transport; connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport.mark_closed()
        self._transport = None
        if self._diverted:
            self._stop_diverting()
        self._parser = None  # it refers to this connection; the cycle would wait for the garbage collector
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if exc is None and self._in_body and not self._framed:
            receiver.on_end()  # a body without a length ends with the connection (RFC 9112, section 6.3)
        elif self.uses > 1 and not self._response_started and monotonic() - self._sent < STALE_WITHIN:
            receiver.on_failure(StaleConnection(self._server, "closed an idle connection as it was used again"))
        else:
            receiver.on_failure(
                Disconnected(self._server, f"closed the connection {'in' if self._response_started else 'before'} its response")
            )

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._receiver is not None:
            self._receiver.on_writable()

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._complete:
            raise _DesyncError  # a second response to one request
        self._headers.clear()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim response (100, 103): the final one follows
        if self._parser.get_http_version() not in _VERSIONS:
            raise BadResponse(self._server, "not HTTP/1.1: it has another version")
        self._in_body = True
        self._keep_alive = self._parser.should_keep_alive()  # llhttp loses it at the end of the message
        headers = self._headers.copy()
        framed = b"content-length" in headers or self._is_chunked(headers)
        if (
            not framed or b"content-type" not in headers or status >= 400
        ):  # otherwise every relevant name is in lower case, as vLLM sends it
            headers = _in_lower_case(headers)
            framed = b"content-length" in headers or self._is_chunked(headers)
        self._framed = framed or status in (204, 304)
        if b"content-length" not in headers:
            self._headers.clear()  # a stream may be open for long
        if self._receiver is not None:
            self._receiver.on_headers(status, headers)

    def _is_chunked(self, headers: Headers) -> bool:
        """Return whether the body is chunked. Raises BadResponse for any other encoding, which the parser would leave in the body."""
        encoding = headers.get(b"transfer-encoding")
        if encoding is not None and encoding.strip(b" ").lower() != b"chunked":
            raise BadResponse(self._server, "its transfer encoding is not 'chunked' alone")
        return encoding is not None

    def on_body(self, data: bytes) -> None:
        self._header_bytes = 0
        self.between_chunks = False
        if self._receiver is not None:
            self._receiver.on_body(data)

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_message_complete(self) -> None:
        if self._in_body:  # interim responses do not reset the count, so a server cannot send them endlessly
            self._header_bytes = 0
        self.between_chunks = False
        self._complete = self._in_body
        self._in_body = False

    def _finish(self) -> None:
        """End the exchange after a complete response, and make the connection idle if it can carry another one."""
        receiver, self._receiver = self._receiver, None
        self._complete = False
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


def _in_lower_case(headers: Headers) -> Headers:
    lower: Headers = {}
    for name, value in headers.items():
        lower.setdefault(name.lower(), value)
    return lower


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


class _DesyncError(Exception):
    """The server started a response without a request."""


async def connect(
    server: str,
    address: Address,
    timeout: float,
    tls: ssl.SSLContext | None,
    on_idle: Callable[[Connection], None],
    write_batch: WriteBatch,
) -> Connection:
    """Open a connection.

    Raises ConnectTimeout after ``timeout`` seconds and a moment, LocalLimit if the gateway cannot open more connections, and ConnectFailed
    for every other failure.
    """
    loop, make = asyncio.get_running_loop(), partial(Connection, server, on_idle, write_batch)
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
