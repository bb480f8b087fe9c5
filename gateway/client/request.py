"""One inference request as its handler sees it: what came, and the way back to its client.

The rules: a response starts once and ends once, and a connection whose response cannot be completed is closed. When the client
disconnects, in any state, the request's handler is cancelled at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec
from msgspec import field
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.admission.body_memory import FREE
from gateway.api.errors import Refusal
from gateway.auth.catalog import Target
from gateway.telemetry.tracing import Trace
from upstream.http.inline_task import InlineTask, Signal

if TYPE_CHECKING:
    from gateway.client.connection import ClientConnection
    from gateway.limits import Permit

_UPLOAD_AHEAD = 256 * 1024  # bytes of a streamed body that may wait for the server, or of a response that is sent without being copied
_PIECE = 64 * 1024  # bytes of a streamed body that are processed in one event-loop iteration


def request_ids() -> Iterator[str]:
    """Generate request IDs: ``req_`` and 24 hexadecimal digits.

    Each begins with the second in which it was generated, like a UUID of version 7, so that a database's index grows at its end. The other
    64 bits are random; they are drawn for many IDs at once.
    """
    while True:
        second, digits = f"req_{int(time()):08x}", os.urandom(8 * 256).hex()
        for start in range(0, len(digits), 16):
            yield second + digits[start : start + 16]


class RequestHead(msgspec.Struct, frozen=True, eq=False):
    """The request line and headers of one request."""

    url: bytes
    """The request target: a path, perhaps with a query."""
    headers: dict[bytes, bytes]
    """By lower-case name. A name that was sent more than once has its last value; ``x-forwarded-for`` has all, joined by commas."""
    http10: bool
    content_length: int | None

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends the body (RFC 9110, section 10.1.1)."""
        return not self.http10 and self.headers.get(b"expect", b"").lower() == b"100-continue"


class RequestBody(msgspec.Struct, eq=False):
    """The body of one request: received from the parser, read by the request's handler.

    Bytes beyond ``limit`` are never stored, and those beyond ``allowance`` only when ``BodyMemory`` has room for them.
    """

    connection: ClientConnection
    head: RequestHead
    limit: int
    """Bytes that the body may have."""
    allowance: int
    """Bytes that it may have before memory is reserved for more."""
    is_form: bool
    """The body is streamed to a server as it arrives."""
    dropped: bool
    """The rest of the body is not stored: it is larger than its limit, or was refused."""
    owner: str = ""
    """The ID of the key for which memory is reserved, once it is known."""
    size: int = 0
    """Bytes received."""
    complete: bool = False
    """All of the body has been received."""
    served: bool = False
    """The request's handler runs: a form is then received as fast as it is read."""
    abandoned: bool = False
    """The response is complete: nothing reads the rest of the body."""
    _buffer: bytes | bytearray = b""
    _has_more: bool = False
    _ahead: bool = False
    _waiter: Signal | None = None
    _requested: bool = False
    _streams_on: bool = False
    _reserved: int = 0
    _reserved_for: str = ""
    _refusal: Refusal | None = None

    # For the handler

    async def read(self) -> bytes | bytearray:
        """Return the whole body, once. Raises Refusal request_too_large beyond the limit, and overloaded if there is no memory for it."""
        if not self.complete:
            self._request()
        while not self.complete and not self.dropped:
            await self._wait()
        return self.take()

    def take(self) -> bytes | bytearray:
        """Return a body that is complete, once. Raises Refusal as ``read`` does."""
        if self.dropped:
            self._check()
        body, self._buffer = self._buffer, b""
        return body

    async def read_piece(self) -> bytes:
        """Return the next ``_PIECE`` of the body or less, as soon as it arrives, and ``b""`` at its end. Raises Refusal as ``read`` does.

        Between two pieces that have been received already, the event loop serves other requests.
        """
        self._request()
        if self._has_more:
            await self.connection.door.steps.pause()
        while not self.complete and not self._buffer and not self.dropped:
            await self._wait()
        self._check()
        buffer = self._buffer
        self._has_more = len(buffer) > _PIECE
        if not self._has_more:
            self._buffer = b""
            self.connection.flow.resume_reading()
            return bytes(buffer)
        self._buffer = buffer = bytearray(buffer) if type(buffer) is bytes else buffer
        piece = bytes(buffer[:_PIECE])
        del buffer[:_PIECE]  # type: ignore[union-attr]
        return piece

    @property
    def consumed(self) -> bool:
        """Whether all of the body has been received and read."""
        return self.complete and not self._buffer

    def stream_on(self) -> None:
        """Send what arrives from now on to a server instead of storing it: it needs no memory reservation."""
        self._streams_on = True

    def read_ahead(self) -> None:
        """Receive a form up to its limit before it is read, so that a disconnect is noticed while the request is queued."""
        self._ahead = True
        self.allowance = min(self.allowance, max(self.size, FREE))
        if self.connection.flow.read_paused:
            self.connection.flow.resume_reading()

    def reserve(self, size: int) -> None:
        """Reserve memory for ``size`` bytes in place of what is reserved, if that is less. Raises Refusal overloaded."""
        if size <= self._reserved or size <= FREE:
            return
        owner = self._reserved_for if self._reserved else self.owner
        if not self.connection.door.memory.take(size - self._reserved, owner, more=self._reserved > 0):
            raise _no_memory()
        self._reserved_for, self._reserved = owner, size

    def release(self) -> None:
        """Return the memory."""
        if self._reserved:
            self.connection.door.memory.give(self._reserved, self._reserved_for)
            self._reserved = 0

    # For the connection

    @property
    def is_awaited(self) -> bool:
        """Whether the client has been asked for the body, and the body is still of use."""
        return self._requested and not self.dropped

    def feed(self, data: bytes) -> None:
        """Store the next bytes of the body."""
        if self.dropped or self.abandoned:
            return
        size = self.size = self.size + len(data)
        if size > self.allowance and not self._may_have(size):
            return
        buffer = self._buffer
        if not buffer:
            self._buffer = data
        elif type(buffer) is bytearray:
            buffer += data
        else:
            self._buffer = bytearray(buffer) + data
        if self.is_form:
            if len(self._buffer) > _UPLOAD_AHEAD and self.served and not self._ahead:
                self.connection.flow.pause_reading()  # until the server has taken more
            self._wake()

    def finish(self) -> None:
        """Note that all of the body has been received."""
        self.complete = True
        if self.connection.flow.read_paused:
            self.connection.flow.resume_reading()
        self._wake()

    def refuse(self, refusal: Refusal) -> None:
        """Store nothing more. Reading the body raises the refusal."""
        self._refusal = refusal
        self.drop()

    def drop(self) -> None:
        """Store nothing more."""
        self.dropped = True
        self._buffer = b""
        self._wake()

    def _request(self) -> None:
        """Ask the client for the body: from now on its timeout counts. A client that waits for ``100 Continue`` gets it."""
        if self._requested:
            return
        self._requested = True
        length = self.head.content_length or 0
        if length > self.allowance and not self.is_form and not self.dropped and not self._make_room(length):
            self.refuse(_no_memory())
        elif not self.dropped and self.head.expects_continue:
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self.dropped:
            raise Refusal("request_too_large", f"The body is larger than {self.limit} bytes.")

    async def _wait(self) -> None:
        self._waiter = Signal()
        await self._waiter

    def _wake(self) -> None:
        """Resume the handler when the parser has returned."""
        if self._waiter is not None:
            self.connection.due, self._waiter = self._waiter.set, None

    def _may_have(self, size: int) -> bool:
        """Return whether the body may grow to this size. If not, it is dropped."""
        if size > self.limit:
            self.drop()
        elif self._streams_on and not self._ahead:
            self.allowance = self.limit
        elif not self._make_room(size):
            self.refuse(_no_memory())
        return not self.dropped

    def _make_room(self, size: int) -> bool:
        """Reserve memory: for the whole body at once, or step by step if its length or the part that is stored is unknown."""
        length = self.head.content_length
        wanted = length if length and not self.is_form else min(size + FREE, length or self.limit)
        owner = self._reserved_for if self._reserved else self.owner
        if not self.connection.door.memory.take(wanted - self._reserved, owner, more=self._reserved > 0):
            return False
        self._reserved_for, self._reserved = owner, wanted
        self.allowance = wanted
        return True


class _Unheard:
    """What uvicorn sets to wake an ASGI application; a ClientRequest has none."""

    def set(self) -> None:
        """Nothing waits here."""


_UNHEARD = _Unheard()


class ClientRequest(msgspec.Struct, eq=False):
    """One inference request, and the way back to its client.

    It stands where uvicorn has its RequestResponseCycle and has the attributes that uvicorn's protocol reads
    there (``response_complete``, ``keep_alive``, ``disconnected``, ``message_event``).
    """

    connection: ClientConnection
    target: Target
    id: str
    head: RequestHead
    body: RequestBody
    keep_alive: bool
    received_at: float = field(default_factory=monotonic)
    trace: Trace | None = None
    """The position of the request in its trace, if it is traced."""
    permit: Permit | None = None
    """The request's share of its key's limits, if the key has any."""
    handler: InlineTask | None = None
    disconnected: bool = False
    message_event: _Unheard = _UNHEARD
    # The response
    response_started: bool = False
    response_complete: bool = False
    is_event_stream: bool = False
    status: int = 0
    bytes_out: int = 0
    extra_headers: bytes = b""
    """Further header lines of the response, each with its CRLF."""
    on_pause: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None
    _chunked: bool = False

    @property
    def requests_in_flight(self) -> int:
        """The number of requests that the worker is processing, this one included."""
        return len(self.connection.tasks)

    @property
    def write_paused(self) -> bool:
        """Whether the client reads more slowly than the response is written."""
        return self.connection.flow.write_paused

    # The response

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send a whole response in one write. ``headers`` are lines that end with CRLF."""
        if self.disconnected:
            return
        size = self.bytes_out = len(body)
        head = self._head(status, headers, b"content-length: %d\r\n" % size)
        if size < _UPLOAD_AHEAD:
            self.connection.transport.write(head + body)
        else:
            self.connection.transport.writelines((head, body))
        self._complete()

    def start_response(self, status: int, headers: bytes, length: int | None, body: bytes = b"", *, event_stream: bool = False) -> None:
        """Send the status line and headers with the first bytes of the body. Without a length the body is chunked.

        ``event_stream``: whether the body is a stream of events, in which an error can still be sent.
        """
        if self.disconnected:
            return
        self.is_event_stream = event_stream
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.head.http10:
            framing, self.keep_alive = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        self._put(self._head(status, headers, framing), body)

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        if data and not self.disconnected:
            self._put(b"", data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Return a function that sends framed chunks of a response that has started; None if it is not chunked."""
        return self.connection.transport.write if self._chunked and not self.disconnected else None

    def finish_response(self) -> None:
        """End a response that has started."""
        if self.disconnected or self.response_complete:
            return
        if self._chunked:
            self.connection.transport.write(b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        """Cut the connection, so that the client does not take a truncated response for a whole one."""
        self.response_complete = True
        self.keep_alive = False
        self.body.abandoned = True
        self.connection.cut()

    def release(self) -> None:
        """Return what the request holds: its handler has finished."""
        self.body.release()
        self.connection.on_call_settled(self)

    def _complete(self) -> None:
        self.response_complete = True
        self.body.abandoned = True
        self.connection.on_call_complete(self)

    def _head(self, status: int, headers: bytes, framing: bytes) -> bytes:
        self.response_started = True
        self.status = status
        if not self.body.complete and not self.response_complete:
            self.keep_alive = False  # the rest of the body is of no use: say so, read it, close
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif self.head.http10:
            framing += b"connection: keep-alive\r\n"
        door = self.connection.door
        if b"origin" in self.head.headers:
            framing += door.cors_lines(self.head.headers[b"origin"])
        if self.extra_headers:
            framing += self.extra_headers
        if self.permit is not None:
            framing += self.permit.lines()
        identity = self.id.encode()
        if self.target.route.anthropic:
            framing += b"request-id: %b\r\n" % identity  # the name that Anthropic's clients read
        return b"%bx-request-id: %b\r\n%b%b%b\r\n" % (STATUS_LINE[status], identity, headers, framing, door.date_line)

    def _put(self, head: bytes, data: bytes) -> None:
        self.bytes_out += len(data)
        if self._chunked and data:
            self.connection.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self.connection.transport.write(head + data)

    # For the connection

    def fail_body(self, refusal: Refusal) -> None:
        """End the body with a refusal: the rest of it is not HTTP, or does not arrive."""
        self.body.refuse(refusal)
        self.keep_alive = False

    def lost(self) -> None:
        """Cancel the handler: the client has disconnected."""
        if not self.response_complete:
            self.disconnected = True
            if self.handler is not None:
                self.handler.cancel()
            else:
                self.body.release()


def _no_memory() -> Refusal:
    return Refusal("overloaded", "The gateway holds too many large requests at the moment.")
