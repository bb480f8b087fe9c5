"""One HTTP/1.1 connection to a server, and the parked ones that wait to be used again.

The rule that keeps it right: a connection carries one exchange at a time, and goes back to its place only
after a whole answer, with nothing over, nothing paused and everything sent. In any other case it is closed,
so no request can ever be answered with another's bytes.

The wire is parsed by llhttp (httptools), strict as it comes. Callbacks go straight from the parser to the
receiver: no task and no queue stands between a chunk's arrival and its relay.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Protocol

import httptools

from upstream.http.address import Address
from upstream.http.errors import BadAnswer, ConnectFailed, ConnectTimeout, Disconnected, LocalLimit, StaleConnection, UpstreamError
from upstream.http.write_batching import BatchingTransport, WriteBatch

MAX_HEAD = 384 * 1024
"""Bytes that an answer's head may have; vLLM's are below 1 KiB, but for vectors in bytes: then it tells 120 bytes of each."""

STALE_WITHIN = 1.0
"""Seconds after a request went out in which the close of a reused connection is taken for the server's idle
limit. Later than that the server had the request, and may have acted upon it."""

AHEAD = 32 * 1024
"""Bytes that a stream's server may have sent and not been read, about: the kernel doubles it (socket(7)). Left to itself it grows to
megabytes where a server is faster than its client, and each read brings a quarter of one into memory, for each slow client. It is
for streams alone: a large answer in one piece takes longer so, most of all from far away."""

STOOD_STILL = 0.1
"""Seconds in which this process, after it has been held up, sees the connections that were made meanwhile."""

EVENT_END = b"\n\n\r\n"
"""How a chunk ends that ends with an event. What the parser has read up to here ends behind a chunk, not behind the line with
the size of the next one, which it tells of no sooner than with that chunk's first byte."""

_VERSIONS = frozenset({"1.1", "1.0"})
_OUR_LIMITS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, socket.EAI_SYSTEM, socket.EAI_MEMORY}
)
"""What the system says when it is the gateway that can open no more connections."""

Headers = dict[bytes, bytes]
"""An answer's headers by name, in lower case; of several of one name the first."""


class Receiver(Protocol):
    """Whoever takes one answer. After ``on_end`` or ``on_failure`` nothing more is called."""

    wants_read_events: bool
    """It wants ``on_read``."""

    def on_headers(self, status: int, headers: Headers) -> None:
        """The final status and headers; interim (1xx) answers are not told."""

    def on_body(self, data: bytes) -> None:
        """The next bytes of the body, without their framing."""

    def on_read(self) -> None:
        """What the last read brought has been told, and the answer is not whole yet."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_failure(self, error: UpstreamError) -> None:
        """There will be no whole answer."""

    def on_writable(self) -> None:
        """The request's bytes have gone out far enough for more."""


class Connection(asyncio.Protocol):
    """One connection: idle, or busy with one exchange, or closed. ``on_idle`` takes it back when it is clean."""

    def __init__(self, server: str, on_idle: Callable[[Connection], None], write_batch: WriteBatch) -> None:
        self._server = server
        self._on_idle = on_idle
        self._write_batch = write_batch
        self._transport: BatchingTransport | None = None
        self._headers: Headers = {}
        self.on_header = self._headers.setdefault  # called by the parser; a method of ours would take six times as long
        self._parser: Any = httptools.HttpResponseParser(self)
        self._paused = False
        self.write_paused = False
        self.uses = 0
        self._read_ahead_limited = False
        # Per-exchange state
        self._receiver: Receiver | None = None
        self._sent = 0.0
        self._head_size = 0  # of what is no body: a head, or a chunk's framing and trailers, since the last of the body
        self._response_started = False  # a byte of an answer has come
        self._in_body = False
        self._framed = False
        self._keep_alive = False
        self._complete = False
        self.between_chunks = False
        """The parser has read up to the end of a chunk that ended with an event."""
        self._request_open = False
        self._diverted = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self._receiver else "idle"
        return f"<Connection to {self._server}, {state}, {self.uses} uses>"

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # What the exchange does

    def send(self, data: bytes, receiver: Receiver, *, more: bool = False) -> None:
        """Begin an exchange with these bytes; ``more`` says that ``send_more`` will follow."""
        assert self._receiver is None and self._transport is not None
        self._receiver = receiver
        self._response_started = False
        self._head_size = 0
        self._request_open = more
        self._sent = monotonic()
        self.uses += 1
        self._transport.write(data)

    def send_more(self, data: bytes, *, more: bool) -> None:
        """The next bytes of the request, or its end."""
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
        """From now on the server may be only ``AHEAD`` of what has been read."""
        if not self._read_ahead_limited and self._transport is not None:
            self._read_ahead_limited = True
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, AHEAD)

    def divert_reads(self, reader: Callable[[bytes], None]) -> None:
        """Until the exchange is over this gets what is read, in place of ``data_received``, to which it may hand on any of it.

        Only whole chunks may be kept from the parser, and only where ``between_chunks``: it is no wiser after them.
        """
        if self._transport is not None:
            self._diverted = True
            self.data_received = reader  # type: ignore[method-assign,assignment]
            self._transport.set_protocol(self)  # the transport has looked the method up, once

    def _stop_diverting(self) -> None:
        self._diverted = False
        del self.data_received
        if self._transport is not None:
            self._transport.set_protocol(self)

    def close(self) -> None:
        """Leave at once. Both directions close together: vLLM takes a half-close for a disconnect anyway."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = BatchingTransport(transport, self._write_batch)  # type: ignore[arg-type]  # both loops give a full Transport here

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.close()  # bytes that nobody asked for: this connection can't be trusted
            return
        self._response_started = True
        self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            found = error.__context__  # what a callback raised
            self._fail(found if isinstance(found, BadAnswer) else BadAnswer(self._server, f"not HTTP/1.1: {error}"))
            return
        if self.between_chunks and data[-4:] != EVENT_END:
            self.between_chunks = False
        if self._complete:
            self._finish()
        elif self._head_size > MAX_HEAD:
            self._fail(BadAnswer(self._server, f"a head of more than {MAX_HEAD} bytes"))
        elif receiver.wants_read_events and receiver is self._receiver:
            receiver.on_read()

    def eof_received(self) -> None:
        return None  # closes the transport; connection_lost tells

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport.mark_closed()
        self._transport = None
        if self._diverted:
            self._stop_diverting()
        self._parser = None  # as what it was diverted to, it holds this, and would wait for the collector
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if exc is None and self._in_body and not self._framed:
            receiver.on_end()  # a body without a length ends with its connection (RFC 9112, section 6.3)
        elif self.uses > 1 and not self._response_started and monotonic() - self._sent < STALE_WITHIN:
            receiver.on_failure(StaleConnection(self._server, "closed a kept connection as it was used again"))
        else:
            receiver.on_failure(
                Disconnected(self._server, f"closed the connection {'in' if self._response_started else 'before'} its answer")
            )

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._receiver is not None:
            self._receiver.on_writable()

    # What the parser calls

    def on_message_begin(self) -> None:
        if self._complete:
            raise _DesyncError  # more than one answer to one request
        self._headers.clear()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # an interim answer (100, 103): the real one follows
        if self._parser.get_http_version() not in _VERSIONS:
            raise BadAnswer(self._server, "not HTTP/1.1: its version is another one")
        self._in_body = True
        self._keep_alive = self._parser.should_keep_alive()  # llhttp forgets it with the end of the message
        headers = self._headers.copy()
        framed = b"content-length" in headers or self._is_chunked(headers)
        if not framed or b"content-type" not in headers or status >= 400:  # else every name that matters is written small, as vLLM's are
            headers = _in_small_letters(headers)
            framed = b"content-length" in headers or self._is_chunked(headers)
        self._framed = framed or status in (204, 304)
        if self._receiver is not None:
            self._receiver.on_headers(status, headers)

    def _is_chunked(self, headers: Headers) -> bool:
        """Whether the body is in chunks. Raises BadAnswer for any other encoding: the parser would leave it in the body."""
        encoding = headers.get(b"transfer-encoding")
        if encoding is not None and encoding.strip(b" ").lower() != b"chunked":
            raise BadAnswer(self._server, "its transfer encoding is not 'chunked' alone")
        return encoding is not None

    def on_body(self, data: bytes) -> None:
        self._head_size = 0
        self.between_chunks = False
        if self._receiver is not None:
            self._receiver.on_body(data)

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_message_complete(self) -> None:
        if self._in_body:  # else an interim answer, of which a server may not send without end
            self._head_size = 0
        self.between_chunks = False
        self._complete = self._in_body
        self._in_body = False

    def _finish(self) -> None:
        """The whole answer is here and nothing behind it: keep the connection if it can carry another."""
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


def _in_small_letters(headers: Headers) -> Headers:
    small: Headers = {}
    for name, value in headers.items():
        small.setdefault(name.lower(), value)
    return small


class _DesyncError(Exception):
    """The server began an answer that nobody asked for."""


async def connect(
    server: str,
    address: Address,
    timeout: float,
    tls: ssl.SSLContext | None,
    on_idle: Callable[[Connection], None],
    write_batch: WriteBatch,
) -> Connection:
    """Open a connection.

    Raises ConnectTimeout after ``timeout`` seconds and a moment, LocalLimit where the gateway can open no more, and ConnectFailed
    for every other refusal.
    """
    loop = asyncio.get_running_loop()

    def make() -> Connection:
        return Connection(server, on_idle, write_batch)

    try:
        async with _connect_timeout(timeout):
            if address.uds:
                _, connection = await loop.create_unix_connection(make, address.uds)
            else:
                _, connection = await loop.create_connection(make, address.host, address.port, ssl=tls)
    except TimeoutError:
        raise ConnectTimeout(server, f"did not accept a connection within {timeout:g} s") from None
    except (OSError, UnicodeError) as error:  # refused, no such socket, name not known or none, TLS refused (ssl.SSLError)
        kind = LocalLimit if isinstance(error, OSError) and error.errno in _OUR_LIMITS else ConnectFailed
        raise kind(server, f"{type(error).__name__}: {error}") from error
    return connection


@asynccontextmanager
async def _connect_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError some time after ``seconds``. What is late by then may have come in time while it was this process that
    stood still, and is seen in the turns of the loop that follow."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + STOOD_STILL))
        try:
            yield
        finally:
            timer.cancel()


class IdleConnections:
    """The idle connections to one server: the last one parked is the first one taken.

    ``max_idle`` is how long, in seconds, one may wait: below the server's own limit, so that the server's
    close does not meet a request on its way.
    """

    def __init__(self, expiry: float) -> None:
        self.max_idle = expiry
        self._idle: list[tuple[float, Connection]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, connection: Connection) -> None:
        """Keep it; where none may wait, close it."""
        if self.max_idle:
            self._idle.append((monotonic(), connection))
        else:
            connection.close()

    def pop(self) -> Connection | None:
        """A connection that is still good, or None."""
        while self._idle:
            since, connection = self._idle.pop()
            if not connection.closed:
                if monotonic() - since < self.max_idle:
                    return connection
                connection.close()
        return None

    def close_expired(self) -> None:
        """Close what has waited too long; called every second or so."""
        limit = monotonic() - self.max_idle
        keep = []
        for since, connection in self._idle:
            if since > limit and not connection.closed:
                keep.append((since, connection))
            else:
                connection.close()
        self._idle = keep

    def close_all(self) -> None:
        """Close every idle connection."""
        while self._idle:
            self._idle.pop()[1].close()
