"""Client connections: from bytes to a ``Call``, and from an answer back to bytes.

uvicorn's httptools protocol carries the connection and every route that Starlette serves. An inference request
is taken out of it here: it gets a ``Call``, which the story reads and writes directly, with no ASGI messages in
between, so that a chunk goes from the server's callback to the client's transport without a task switch.

The rules: reading from a client never pauses once its body is in, or its leaving would not be seen; when a
client leaves, in whatever state, the task that serves it is cancelled at once; an answer begins once and ends
once, and whatever cannot be answered any more is closed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.catalog import Target
from gateway.errors import Refusal, render
from gateway.routes import Body

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD = 64 * 1024
"""Bytes of a request's head."""
MAX_HEADERS = 100
MAX_PIPELINED = 16
"""Requests that a client may send ahead of their answers."""
KEEP_ALIVE = 75.0
"""Seconds for which a connection may be idle between two requests."""
LINGER = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client can read its answer."""
_UPLOAD_AHEAD = 256 * 1024

Serve = Callable[["Call"], Coroutine[Any, Any, None]]
Lookup = Callable[[str], Target | None]
CorsLines = Callable[[bytes], bytes]


def request_id() -> str:
    """``req_`` and 24 hexadecimal digits."""
    return f"req_{os.urandom(12).hex()}"


class Call:
    """One inference request and the way back to its client.

    It stands where uvicorn has its RequestResponseCycle and keeps the attributes that uvicorn's protocol reads
    there (``response_complete``, ``keep_alive``, ``disconnected``, ``message_event``).
    """

    __slots__ = (
        "_chunked", "_cors", "_edge", "_expects_continue", "_limit", "_received", "_size", "_spoilt", "_waiter",
        "began", "bytes_in", "bytes_out", "disconnected", "events", "headers", "http10", "id", "keep_alive", "message_event", "more_body",
        "on_pause", "on_resume", "response_complete", "started", "status", "target", "task", "too_large",
    )  # fmt: skip

    def __init__(self, edge: EdgeProtocol, target: Target, headers: dict[bytes, bytes], *, http10: bool, keep_alive: bool) -> None:
        self._edge = edge
        self.target = target
        self.headers = headers
        self.id = request_id()
        self.began = edge.loop.time()
        self.http10 = http10
        self.keep_alive = keep_alive
        origin = headers.get(b"origin")
        self._cors = b"" if origin is None else edge.cors_lines(origin)
        # The body
        self._limit = edge.body_limit()
        self._received: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._expects_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self._spoilt: Refusal | None = None
        self.bytes_in = 0
        self.more_body = True
        self.too_large = int(headers.get(b"content-length", b"0")) > self._limit
        # The answer
        self._chunked = False
        self.started = False
        self.events = False
        self.response_complete = False
        self.status = 0
        self.bytes_out = 0
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        # The connection
        self.disconnected = False
        self.message_event = _Unheard()
        self.task: asyncio.Task[None] | None = None

    # Reading

    async def body(self) -> bytes:
        """The whole body. Raises Refusal request_too_large beyond the limit."""
        self._go_on()
        while self.more_body and not self._over:
            await self._wait()
        self._check()
        return self._received[0] if len(self._received) == 1 else b"".join(self._received)

    async def next_bytes(self) -> bytes:
        """The next part of the body as it comes, ``b""`` at its end. Raises Refusal request_too_large."""
        self._go_on()
        while self.more_body and not self._received and not self._over:
            await self._wait()
        self._check()
        data, self._received, self._size = b"".join(self._received), [], 0
        self._edge.flow.resume_reading()
        return data

    @property
    def _over(self) -> bool:
        return self.too_large or self._spoilt is not None

    def _go_on(self) -> None:
        if self._expects_continue and not self.too_large:
            self._edge.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False

    def _check(self) -> None:
        if self._spoilt is not None:
            raise self._spoilt
        if self.too_large:
            raise Refusal("request_too_large", f"The body is larger than {self._limit} bytes.")

    async def _wait(self) -> None:
        self._waiter = self._edge.loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def received(self, data: bytes) -> None:
        """The parser gave more of the body."""
        if self.response_complete or self.too_large:
            return  # nobody will read it
        self.bytes_in += len(data)
        self.too_large = self.bytes_in > self._limit
        self._received.append(data)
        self._size += len(data)
        if self._size > _UPLOAD_AHEAD and self.target.route.body is Body.FORM and self.task is not None:
            self._edge.flow.pause_reading()  # streamed on as fast as the server takes it
        self._wake()

    def spoil(self, refusal: Refusal) -> None:
        """The rest of the body is no HTTP: whoever reads it gets the refusal."""
        self._spoilt = refusal
        self.keep_alive = False
        self._wake()

    def received_all(self) -> None:
        """The body is in."""
        self.more_body = False
        self._edge.flow.resume_reading()
        self._wake()

    # Writing

    @property
    def write_paused(self) -> bool:
        """The client has fallen behind what was written."""
        return self._edge.flow.write_paused

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole answer in one write. ``headers`` are lines that end with CRLF."""
        self.begin(status, headers, len(body), body)
        self.finish()

    def begin(self, status: int, headers: bytes, length: int | None, body: bytes = b"", *, events: bool = False) -> None:
        """The head, with the first bytes of the body; without a length the body is chunked.

        ``events`` says that the body is a stream of events, in which an error can still be told.
        """
        if self.disconnected:
            return
        self.started = True
        self.events = events
        self.status = status
        if self.more_body and not self.response_complete:
            self.keep_alive = False  # the rest of the body is of no use: tell the client, read it off, close
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.http10:
            framing, self.keep_alive = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif self.http10:
            framing += b"connection: keep-alive\r\n"
        if self.target.route.anthropic:
            framing += b"request-id: %b\r\n" % self.id.encode()  # the name that Anthropic's clients read
        head = b"%bx-request-id: %b\r\n%b%b%b%b\r\n" % (
            STATUS_LINE[status],
            self.id.encode(),
            headers,
            self._cors,
            framing,
            self._edge.date_line(),
        )
        self._put(head, body)

    def write(self, data: bytes) -> None:
        """More of the body, at once."""
        if data and not self.disconnected:
            self._put(b"", data)

    def _put(self, head: bytes, data: bytes) -> None:
        self.bytes_out += len(data)
        if self._chunked and data:
            self._edge.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        elif len(data) > _UPLOAD_AHEAD and head:
            self._edge.transport.writelines((head, data))
        else:
            self._edge.transport.write(head + data)

    def finish(self) -> None:
        """The answer is whole."""
        if self.disconnected or self.response_complete:
            return
        if self._chunked:
            self._edge.transport.write(b"0\r\n\r\n")
        self.response_complete = True
        self._edge.on_call_complete(self)

    def abort(self) -> None:
        """The answer can't be completed: cut the connection, so that nobody takes it for whole."""
        self.response_complete = True
        self.keep_alive = False
        self._edge.transport.abort()

    # What the edge tells

    def lost(self) -> None:
        """The client has left."""
        if not self.response_complete:
            self.disconnected = True
            if self.task is not None:
                self.task.cancel()


class _Unheard:
    """What uvicorn sets to wake an ASGI application; a Call has none."""

    def set(self) -> None:
        """Nothing waits here."""


class EdgeProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the inference routes taken out of it.

    ``lookup`` finds the target of a path, ``serve`` is the story, ``body_limit`` the bytes a body may have,
    ``cors_lines`` the headers for a page of an origin.
    """

    cycle: Any  # uvicorn's RequestResponseCycle or a Call
    pipeline: Any

    def __init__(
        self, *args: Any, lookup: Lookup, serve: Serve, body_limit: Callable[[], int], cors_lines: CorsLines, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lookup = lookup
        self._serve = serve
        self.body_limit = body_limit
        self.cors_lines = cors_lines
        self._call: Call | None = None  # the last one whose turn came; uvicorn's ``cycle`` may be one that waits behind it
        self._incoming: Call | None = None  # whose body is being parsed, when it is one of ours
        self._head_size = 0  # of what is no body: a head, or a chunk's framing and trailers, since the last of the body
        self._lingering = False
        self._resuming = False
        self.quiet_since: float | None = self.loop.time()
        """When the connection fell idle; None while a request is in progress."""

    def date_line(self) -> bytes:
        """The Date header, as uvicorn's clock has it."""
        return b"".join(b"%b: %b\r\n" % line for line in self.server_state.default_headers)

    # Transport callbacks

    def data_received(self, data: bytes) -> None:
        if self._lingering and self._incoming is None:
            return
        self.quiet_since = None
        self._head_size += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._refuse_bytes(_refusal_of(error))
            return
        except httptools.HttpParserError:
            self._refuse_bytes(Refusal("invalid_request", "The request is not valid HTTP/1.1."))
            return
        except httptools.HttpParserUpgrade as offer:
            self._read_on(data[offer.args[0] :])
            return
        if self._head_size > MAX_HEAD:
            self._refuse_bytes(_head_too_large())

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in (self._call, *waiting):
            if isinstance(cycle, Call):
                cycle.lost()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        call = self._call
        if call is not None and not call.response_complete and call.on_pause is not None:
            call.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()
        call = self._call
        if call is not None and not call.response_complete and call.on_resume is not None:
            call.on_resume()

    # Parser callbacks

    def on_message_begin(self) -> None:
        if not self._resuming:
            self._incoming = None
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._resuming:
            return
        super().on_url(url)
        if len(self.url) > MAX_HEAD:
            raise _head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._resuming:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise _head_too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._resuming:
            self._resuming = False
            return
        if self._lingering:
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD:
            raise _head_too_large()
        if self._busy and len(self.pipeline) >= MAX_PIPELINED:
            raise Refusal("invalid_request", f"More than {MAX_PIPELINED} requests were sent ahead of their answers.")
        target = self._lookup(self.url.partition(b"?")[0].decode("latin-1")) if self.parser.get_method() == b"POST" else None
        if target is None:
            super().on_headers_complete()
            self.flow.resume_reading()  # uvicorn pauses it where a request waits for its turn
            return
        http10 = self.parser.get_http_version() == "1.0"
        call = Call(self, target, _unique(self.headers), http10=http10, keep_alive=self.parser.should_keep_alive())
        self._incoming = call
        if self._busy:
            self.pipeline.appendleft((call, self.app))
        else:
            self._start(call)

    def on_body(self, body: bytes) -> None:
        self._head_size = 0
        if self._incoming is not None:
            self._incoming.received(body)  # no other route reads its body

    def on_message_complete(self) -> None:
        if self._incoming is not None and self.parser.should_upgrade():
            return  # its body comes all the same: see _read_on
        self._head_size = 0
        call, self._incoming = self._incoming, None
        if call is not None:
            call.received_all()
            if call.response_complete:
                self._close_or_wait(call)
        elif not self._lingering:
            super().on_message_complete()

    def _read_on(self, rest: bytes) -> None:
        """Behind the offer of another protocol, which is ignored (RFC 9110, section 7.8); Java's client makes it by default.

        httptools stops there and takes the request for one without a body, so a new parser, which is told the framing
        alone, reads on.
        """
        call = self._incoming
        if call is None:
            self.cycle.keep_alive = False
            return
        framing = (b"%b: %b\r\n" % (name, call.headers[name]) for name in _FRAMING if name in call.headers)
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        self.data_received(rest)

    # The way of a call

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start(self, call: Call) -> None:
        self.cycle = self._call = call
        self.quiet_since = None
        call.task = task = self.loop.create_task(self._serve(call))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _start_asgi_task(self, cycle: Any, app: ASGI3Application) -> None:
        if isinstance(cycle, Call):
            self._start(cycle)
        else:
            self.cycle = cycle
            super()._start_asgi_task(cycle, app)

    def on_call_complete(self, call: Call) -> None:
        """The answer has been written: close, wait for the next request, or begin the one that waits."""
        self.server_state.total_requests += 1
        if call.more_body:
            self._linger()
        else:
            self._close_or_wait(call)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._busy:
            self.quiet_since = self.loop.time()
        self._unset_keepalive_if_required()  # check_idle does it for all connections with one clock

    def _close_or_wait(self, call: Call) -> None:
        if not call.keep_alive:
            self.transport.close()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self.quiet_since = self.loop.time()
        if self.flow.write_paused:
            self.flow.pause_reading()  # whoever does not read its answers is not asked for more

    def _linger(self) -> None:
        """Answered before its body was in: read it off for a while, then close (RFC 9112, section 9.6)."""
        self._lingering = True
        self.flow.resume_reading()
        self.loop.call_later(LINGER, self.transport.close)

    def check_idle(self, now: float) -> None:
        """Close the connection if it has been idle for too long."""
        if self.quiet_since is not None and now - self.quiet_since > KEEP_ALIVE:
            self.transport.close()

    def _refuse_bytes(self, refusal: Refusal) -> None:
        """These bytes are no request that could be served. What is being served ends first; then close."""
        call, self._incoming = self._incoming, None
        if self._lingering:
            return  # it was refused already; nothing more is parsed
        self._lingering = True
        if call is not None:
            call.spoil(refusal)
        if self._busy:
            self.cycle.keep_alive = False
        elif not self.transport.is_closing():
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        body = render(refusal)
        lines = b"content-type: application/json\r\nx-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n"
        head = STATUS_LINE[refusal.row.status] + lines % (request_id().encode(), len(body)) + self.date_line()
        self.transport.write(head + b"\r\n" + body)
        self._linger()


def _head_too_large() -> Refusal:
    return Refusal("headers_too_large", f"The head of the request is larger than {MAX_HEAD} bytes or has more than {MAX_HEADERS} headers.")


def _refusal_of(error: BaseException) -> Refusal:
    """The Refusal that a parser callback raised; httptools wraps it."""
    cause = error.__context__ or error.__cause__
    return cause if isinstance(cause, Refusal) else Refusal("invalid_request", "The request is not valid HTTP/1.1.")


_FRAMING = (b"content-length", b"transfer-encoding")
_ONCE = frozenset({b"authorization", b"x-api-key", b"content-type", b"content-length", b"content-encoding", b"host", b"transfer-encoding"})


def _unique(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by name. Raises Refusal when one that decides something is there twice, or for a strange encoding."""
    unique = dict(headers)
    if unique.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        raise Refusal("invalid_request", "The only transfer encoding is 'chunked'.")
    if len(unique) < len(headers):
        seen: set[bytes] = set()
        for name, _ in headers:
            if name in seen and name in _ONCE:
                raise Refusal("invalid_request", f"The header '{name.decode('latin-1')}' was sent more than once.")
            seen.add(name)
    return unique
