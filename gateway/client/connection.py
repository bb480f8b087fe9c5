"""Client connections: from bytes to a ``ClientRequest``, one request after the other.

uvicorn's httptools protocol carries the connection and every route that Starlette serves. An inference request
is taken out of it here: it gets a ``ClientRequest``, which the story reads and writes directly, with no ASGI messages in
between, so that a chunk goes from the server's callback to the client's transport without a task switch.

The rules: reading from a client never pauses once its body is in, or its leaving would not be seen; when a
client leaves, every call on its connection is told at once; requests are answered in the order in which they came, and
what is none is refused behind them, after which nothing is parsed; whatever is waited for of a client has an end (``patience``).
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.admission.body_memory import BodyMemory
from gateway.api.errors import Refusal, render
from gateway.auth.catalog import Target
from gateway.client.addresses import Connections, Proxies, counted_as, shown
from gateway.client.eviction import Unauthenticated
from gateway.client.request import ClientRequest, RequestBody, RequestHead
from gateway.client.timeouts import Patience, Wait
from gateway.snapshot.snapshot import Clients
from gateway.system.steps import Steps
from gateway.telemetry.metrics import WorkerMetrics
from upstream.http.inline_task import InlineTask
from upstream.http.write_batching import BatchingTransport, WriteBatch

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD = 64 * 1024
"""Bytes of a request's head."""
MAX_HEADERS = 100
MAX_PIPELINED = 16
"""Requests that a client may send ahead of their answers."""
_FRAMING_PER_BYTE = 8
"""Bytes of framing that come with each of a body: a chunk of one byte has five. Longer ones, with extensions, add up like a head."""
_UNAUTHORIZED = 401
_VERSION, _HEAD_END = b" HTTP/1.", b"\r\n\r\n"
LINGER = 2.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client can read its answer."""

_RESET = struct.pack("ii", 1, 0)  # to linger, for no time (socket(7)): the connection is reset

# By names of the module's own: that of a member costs a call with CPython 3.11.
_FIRST_BYTE, _HEAD, _BODY, _NEXT_REQUEST = Wait.FIRST_BYTE, Wait.HEAD, Wait.BODY, Wait.NEXT_REQUEST
_FAULTS = {
    Wait.FIRST_BYTE: "silent",
    Wait.HEAD: "slow_head",
    Wait.BODY: "slow_body",
    Wait.REST: "slow_body",
    Wait.READER: "slow_reader",
}
"""How it is counted that a client has kept its connection waiting for too long; being idle is no fault."""


class Door(Protocol):
    """What a connection needs of its worker."""

    request_ids: Iterator[str]
    body_limit: int
    """Bytes that a body may have."""
    body_allowance: int
    """Bytes of it that are no matter."""
    memory: BodyMemory
    steps: Steps
    clients: Clients
    proxies: Proxies
    addresses: Connections
    unauthenticated: Unauthenticated
    metrics: WorkerMetrics
    leaving: bool
    """The gateway is about to end: each answer is the last one on its connection."""
    date_line: bytes
    """The Date header of this second."""
    write_batch: WriteBatch

    @property
    def targets(self) -> Mapping[bytes, Target]:
        """What can be asked, by its path."""

    def serve(self, call: ClientRequest) -> Coroutine[Any, Any, None]:
        """The story of a request."""

    def unknown(self, call: ClientRequest) -> Refusal | None:
        """Why the request would be refused for its key now; None when it would not."""

    def cors_lines(self, origin: bytes) -> bytes:
        """The headers for a page of an origin."""


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol, with the inference routes taken out of it."""

    cycle: Any  # uvicorn's RequestResponseCycle or a ClientRequest
    transport: BatchingTransport
    parser: Any
    pipeline: Any  # of what waits for its turn: requests, and as the last of all perhaps the Refusal of what is none

    def __init__(self, *args: Any, door: Door, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.door = door
        self._call: ClientRequest | None = None  # the last one whose turn came; uvicorn's ``cycle`` may be one that waits behind it
        self._incoming: ClientRequest | None = None  # whose body is being parsed, when it is one of ours
        self._head_size = 0  # of what is no body: a head, chunks' framing and trailers, as far as it is more than a body's usual
        self._lingering = False
        self._resuming = False
        self.due: Callable[[], None] | None = None
        """What is to be done when the parser has returned: the stories of this connection run outside of it."""
        self.address = ""
        """The other end's."""
        self.proxied = False
        """The other end is a trusted proxy, which says who the client is."""
        self._counted: str | None = None
        self._line = b"\n"  # the request line of the request before, up to its version; before the first one what none is
        self._line_so_far: bytes | None = None  # of a request line that is not whole, and perhaps what stands before it
        self._host = _NO_HOST  # the last one that was found good
        self._reading = _FIRST_BYTE  # what the parser is in
        self._patience = Patience()

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(BatchingTransport(transport, self.door.write_batch))  # type: ignore[arg-type]  # both loops give a full Transport here
        self.address = shown(self.client[0]) if self.client else ""
        self.proxied = self.door.proxies.trusts(self.address)
        self.door.unauthenticated.relieve(self.transport.get_extra_info("socket").fileno())
        self.door.unauthenticated.add(self)
        most = self.door.clients.max_per_address
        if most is not None and not self.proxied:
            self._count(counted_as(self.address), most)

    def _count(self, client: str, most: int) -> None:
        if self.door.addresses.enter(client, most):
            self._counted = client
        else:
            self.door.metrics.client_fault("too_many")
            self._turn_away()

    def _turn_away(self) -> None:
        """Say why, and close: one write, and nothing is kept. Behind a handshake closing takes longer, so it is cut there."""
        self._lingering = True
        if self.scheme == "https":
            self.transport.abort()
            return
        with suppress(OSError):  # what has come already would make the kernel reset the connection instead of ending it
            os.read(self.transport.get_extra_info("socket").fileno(), MAX_HEAD)
        self._tell(Refusal("rate_limit_exceeded", "There are too many connections from this address."))
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lingering and self._incoming is None:
            return
        self._head_size += len(data)
        try:
            # Most reads contain one request line, at their start, and it is the same as that of the request before.
            if self._reading is _BODY or data.rpartition(_VERSION)[0] != self._line:
                self._feed_by_lines(data)
            else:
                self.parser.feed_data(data)
                if self._reading is _HEAD and data.find(_HEAD_END) >= 0:
                    self._line_so_far = data[-MAX_HEAD:]
        except httptools.HttpParserCallbackError as error:
            self._refuse_bytes(_refusal_of(error))
        except httptools.HttpParserError:
            self._refuse_bytes(Refusal("invalid_request", "The request is not valid HTTP/1.1."))
        except Refusal as refusal:
            self._refuse_bytes(refusal)
        except httptools.HttpParserUpgrade as offer:
            self._read_on(data[offer.args[0] :])
        else:
            if self._head_size > MAX_HEAD:
                self._refuse_bytes(_head_too_large())
        if self.due is not None:
            self._go_on()

    def _feed_by_lines(self, data: bytes) -> None:
        """Feed the parser so that each request line is seen beside what the parser takes it for. Raises what ``feed_data`` raises, and
        Refusal for a line that has more than one space between two parts: the parser takes them for one and does not report them.

        A read that begins with the line of the request before and has no other is not cut.
        """
        at, size = 0, len(data)
        while at < size:
            version = data.find(_VERSION, at)
            if version < 0 and self._line_so_far is None:
                end = size
            elif version < 0 or self._line_so_far is not None:
                end = data.find(b"\n", at) + 1 or size
            else:
                end = data.rfind(b"\n", at, version) + 1 or data.find(b"\n", version) + 1 or size
            try:
                self._feed_line(data[at:end])
            except httptools.HttpParserUpgrade as offer:
                raise httptools.HttpParserUpgrade(at + offer.args[0]) from None
            at = end

    def _feed_line(self, line: bytes) -> None:
        headers = self.headers
        self.parser.feed_data(line)
        so_far = b"" if self.headers is not headers else self._line_so_far
        if so_far is None:
            return
        so_far = (so_far + line)[-MAX_HEAD:]
        if not line.endswith(b"\n"):
            self._line_so_far = so_far
            return
        self._line_so_far = None
        start = b"%b %b" % (self.parser.get_method(), self.url)
        if not so_far.endswith(b"%b HTTP/%b\r\n" % (start, self.parser.get_http_version().encode())):
            raise Refusal("invalid_request", "The request line must have one space between its parts.")
        self._line = start

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.mark_closed()
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in (self._call, *waiting):
            if isinstance(cycle, ClientRequest):
                cycle.lost()
        self.pipeline.clear()
        self.door.unauthenticated.remove(self)
        if self._counted is not None:
            self.door.addresses.leave(self._counted)
        super().connection_lost(exc)
        self.cycle = self._call = self._incoming = self.parser = None  # each of them holds this, and would wait for the collector

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
            self._reading = _HEAD
            self._incoming = None
            self.url = b""
            self.headers = []

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self.url += url
            if len(self.url) > MAX_HEAD:
                raise _head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._resuming:
            self._resuming = False
            return
        if self._lingering:
            return
        headers = self.headers
        if len(headers) > MAX_HEADERS or (self._head_size > MAX_HEAD and self._size_of_head() > MAX_HEAD):
            raise _head_too_large()
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and len(self.pipeline) >= MAX_PIPELINED:
            raise Refusal("invalid_request", f"More than {MAX_PIPELINED} requests were sent ahead of their answers.")
        parser, door = self.parser, self.door
        version = parser.get_http_version()
        http10 = version != "1.1"
        if http10 and version != "1.0":
            raise Refusal("invalid_request", "The version of HTTP is not 1.0 or 1.1.")
        unique, limit = _unique(headers, http10), door.body_limit
        if unique.get(b"host") != self._host:
            self._look_at_host(unique, http10)
        target = door.targets.get(self.url) or door.targets.get(self.url.partition(b"?")[0])
        if target is None or parser.get_method() != b"POST":
            if not self.url.startswith((b"/", b"*")):
                raise Refusal("invalid_request", "The target of a request is a path.")  # in absolute form two could read two hosts
            self._leave_to_starlette()
            self._reading = _BODY
            return
        self._reading = _BODY
        length = int(unique[b"content-length"]) if b"content-length" in unique else None
        head = RequestHead(self.url, unique, http10, length)
        body = RequestBody(self, head, limit, door.body_allowance, target.route.takes_form, length is not None and length > limit)
        keep_alive = parser.should_keep_alive() and not door.leaving
        call = self._incoming = ClientRequest(self, target, next(door.request_ids), head, body, keep_alive)
        if busy:
            self._let_wait(call)
        else:
            self._start(call)

    def _let_wait(self, call: ClientRequest) -> None:
        """It was sent ahead. Without a good key no body of it is kept, so in its turn it is refused, whatever has become of the key."""
        if (unknown := self.door.unknown(call)) is not None:
            call.body.refuse(unknown)
        self.pipeline.appendleft((call, self.app))

    def _look_at_host(self, headers: Mapping[bytes, bytes], http10: bool) -> None:
        """Nothing here goes by it, but what stands in front may (RFC 9112, section 3.2). Raises Refusal where it is none."""
        host = headers.get(b"host")
        if host is not None and is_host(host):
            self._host = host
        elif host is not None or not http10:
            raise Refusal("invalid_request", "The header 'host' is missing or no valid host.")

    def _size_of_head(self) -> int:
        """Worked out only where it might be too much: what came in the same read may be a part of the body."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _leave_to_starlette(self) -> None:
        """Let uvicorn have the head after all; for ours its scope is never made."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.scope["headers"] = headers.copy()  # of its own: what comes in trailers is no header (RFC 9110, section 6.5.1)
        self.expect_100_continue = any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
        super().on_headers_complete()
        if self.door.leaving:
            self.cycle.keep_alive = False
        self.flow.resume_reading()  # uvicorn pauses it where a request waits for its turn

    def on_body(self, body: bytes) -> None:
        left = self._head_size - _FRAMING_PER_BYTE * len(body)
        self._head_size = left if left > 0 else 0
        if self._incoming is not None:
            self._incoming.body.feed(body)  # no other route reads its body

    def on_message_complete(self) -> None:
        call = self._incoming
        if call is not None and self.parser.should_upgrade():
            return  # its body comes all the same: see _read_on
        if self._head_size > MAX_HEAD and self._size_of_head() > MAX_HEAD:
            raise _head_too_large()  # with its trailers, which are among the headers by now
        self._reading = _NEXT_REQUEST
        self._head_size = 0
        self._incoming = None
        if call is not None:
            call.body.finish()
            if call.response_complete:
                self._close_or_wait(call)
        elif not self._lingering:
            super().on_message_complete()

    def _read_on(self, rest: bytes) -> None:
        """Behind the offer of another protocol, which is ignored (RFC 9110, section 7.8); Java's client makes it by default.

        httptools stops there and takes the request for one without a body, so a new parser, which is told the framing
        and whether the connection ends with it, reads on.
        """
        call = self._incoming
        if call is None:
            self.cycle.keep_alive = False
            self._lingering = True  # what comes behind it is nobody's
            return
        framing = [b"%b: %b\r\n" % (name, call.head.headers[name]) for name in _FRAMING if name in call.head.headers]
        if not call.keep_alive:
            framing.append(b"connection: close\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        self.data_received(rest)

    def client_of(self, headers: Mapping[bytes, bytes]) -> str:
        """The address of who sent a request, as far as that is known."""
        return self.door.proxies.client(self.address, headers.get(FORWARDED, b"")) if self.proxied else self.address

    # When descriptors run out

    @property
    def has_valid_key(self) -> bool:
        """The last inference request that has begun had a valid key. One that is being served has it: others are answered at once."""
        return self._call is not None and self._call.status != _UNAUTHORIZED

    @property
    def is_idle(self) -> bool:
        """No request is being served."""
        return not self._busy

    def evict(self) -> None:
        """Close at once."""
        self.door.metrics.client_fault("evicted")
        self.transport.abort()

    # The way of a call

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start(self, call: ClientRequest) -> None:
        self.cycle = self._call = call
        call.body.served = True
        call.handler = task = InlineTask(self.door.serve(call))
        self.tasks.add(task)  # type: ignore[arg-type]  # it can be cancelled, which is all that is done to what is in there
        self.due = task.step

    def _go_on(self) -> None:
        due, self.due = self.due, None
        if due is not None:
            due()

    def on_call_settled(self, call: ClientRequest) -> None:
        """Nothing more happens for it."""
        self.tasks.discard(call.handler)

    def _start_asgi_task(self, cycle: Any, app: ASGI3Application) -> None:
        if isinstance(cycle, ClientRequest):
            self._start(cycle)
            self.loop.call_soon(self._go_on)
        elif isinstance(cycle, Refusal):
            self._refuse(cycle)
        else:
            self.cycle = cycle
            super()._start_asgi_task(cycle, app)

    def on_call_complete(self, call: ClientRequest) -> None:
        """The answer has been written: close, wait for the next request, or begin the one that waits."""
        self.server_state.total_requests += 1
        if not call.body.complete:
            self._linger()
        else:
            self._close_or_wait(call)

    def cut(self) -> None:
        """Close at once. An older client may know an answer's end by that of its connection alone, so to it this is none in order."""
        if self._call is not None and self._call.head.http10:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # check does it for all connections with one clock

    def _close_or_wait(self, call: ClientRequest) -> None:
        if not call.keep_alive:
            self.transport.close()
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.flow.write_paused:
            self.flow.pause_reading()  # whoever does not read its answers is not asked for more

    def _linger(self) -> None:
        """Answered before its body was in: read it off for a while, then close (RFC 9112, section 9.6)."""
        self._lingering = True
        self.flow.resume_reading()
        self.loop.call_later(LINGER, self.transport.close)

    # The clock

    def check(self, now: float) -> None:
        """Act if the client has kept the connection waiting for too long. Called every second or so with ``time.monotonic``."""
        wait, message, moved = self._awaited()
        if self._patience.is_over(wait, message, moved, now, self.door.clients):
            self._give_up(wait)

    @property
    def is_awaited(self) -> bool:
        """Whether its first request, or the rest of a head, may be on its way."""
        return self._reading in (_FIRST_BYTE, _HEAD) and not self._lingering and not self.transport.is_closing()

    def _awaited(self) -> tuple[Wait, object, int]:
        """What is waited for, in which request, and how many bytes of it have moved."""
        behind = self.transport.get_write_buffer_size()
        if behind:
            return Wait.READER, None, (self._call.bytes_out if self._call is not None else 0) - behind
        if self._lingering or self.transport.is_closing():
            return Wait.NOTHING, None, 0
        if self._reading is _BODY:
            return self._awaited_body()
        return (Wait.NOTHING, None, 0) if self._busy else (self._reading, self.headers, 0)

    def _awaited_body(self) -> tuple[Wait, object, int]:
        call = self._incoming
        if call is None:
            return (Wait.NOTHING if self._busy else Wait.REST), self.headers, 0
        if call.body.is_awaited and not call.response_started and not self.flow.read_paused:
            return Wait.BODY, call, call.body.size
        return Wait.NOTHING, None, 0

    def _give_up(self, wait: Wait) -> None:
        if wait in _FAULTS:
            self.door.metrics.client_fault(_FAULTS[wait])
        if wait is Wait.READER:
            self.cut()
        elif wait in (Wait.HEAD, Wait.BODY):
            self._end_with(Refusal("request_timeout", "The request was not sent in time."))
            self._go_on()
        else:
            self.transport.close()

    # Refusals

    def _refuse_bytes(self, refusal: Refusal) -> None:
        """These bytes are no request that could be served."""
        if not self._lingering:  # else it was refused already
            self.door.metrics.client_fault("malformed")
        self._end_with(refusal)

    def _end_with(self, refusal: Refusal) -> None:
        """No more requests are taken. Those that came before are answered, each in its turn; then this is told, and the end."""
        call, self._incoming = self._incoming, None
        if self._lingering:
            return  # nothing more is parsed
        self._lingering = True
        if call is not None:
            call.fail_body(refusal)  # its answer is the last one
        elif self._reading is _BODY:
            self._end_behind_the_last()
        elif self._busy:
            self.pipeline.appendleft((refusal, self.app))
        elif not self.transport.is_closing():
            self._refuse(refusal)

    def _end_behind_the_last(self) -> None:
        """Its body goes wrong, which none of Starlette's routes reads: it has an answer of its own."""
        last = self.pipeline[0][0] if self.pipeline else self.cycle
        if last.response_complete:
            self._linger()
        else:
            last.keep_alive = False

    def _refuse(self, refusal: Refusal) -> None:
        self._tell(refusal)
        self._linger()

    def _tell(self, refusal: Refusal) -> None:
        body = render(refusal)
        lines = b"content-type: application/json\r\nx-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n"
        head = STATUS_LINE[refusal.row.status] + lines % (next(self.door.request_ids).encode(), len(body)) + self.door.date_line
        own = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers.items())
        self.transport.write(head + own.encode() + b"\r\n" + body)


def _head_too_large() -> Refusal:
    return Refusal("headers_too_large", f"The head of the request is larger than {MAX_HEAD} bytes or has more than {MAX_HEADERS} headers.")


def _refusal_of(error: BaseException) -> Refusal:
    """The Refusal that a parser callback raised; httptools wraps it."""
    cause = error.__context__ or error.__cause__
    return cause if isinstance(cause, Refusal) else Refusal("invalid_request", "The request is not valid HTTP/1.1.")


_NO_HOST = b"\n"  # which no header can be
_HOST = re.compile(rb"(?:\[([^]]*)\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}){1,255})(?::[0-9]{0,5})?", re.ASCII)
"""RFC 3986, section 3.2.2, with the length that names have (RFC 1035), and not empty (RFC 9110, section 4.2.1)."""


def is_host(value: bytes) -> bool:
    """Whether a Host header says one host: a name, or an address as it stands in a URL, and perhaps a port."""
    found = _HOST.fullmatch(value)
    return found is not None and (found[1] is None or _is_ipv6(found[1]))


def _is_ipv6(text: bytes) -> bool:
    try:
        IPv6Address(text.decode("latin-1"))
    except ValueError:
        return False
    return True


FORWARDED = b"x-forwarded-for"
_FRAMING = (b"content-length", b"transfer-encoding")
_ONCE = frozenset({b"authorization", b"x-api-key", b"content-type", b"content-length", b"content-encoding", b"host", b"transfer-encoding"})


def _unique(headers: list[tuple[bytes, bytes]], http10: bool) -> dict[bytes, bytes]:
    """The headers by name. Raises Refusal when one that decides something is there twice, or for a strange encoding."""
    unique = dict(headers)
    if b"transfer-encoding" in unique and (http10 or unique[b"transfer-encoding"].strip(b" ").lower() != b"chunked"):
        raise Refusal("invalid_request", "The only transfer encoding is 'chunked', and with HTTP/1.1 only.")
    if len(unique) < len(headers):
        seen: set[bytes] = set()
        for name, _ in headers:
            if name in seen and name in _ONCE:
                raise Refusal("invalid_request", f"The header '{name.decode('latin-1')}' was sent more than once.")
            seen.add(name)
        unique[FORWARDED] = b",".join(value for name, value in headers if name == FORWARDED)  # one list (RFC 9110, section 5.3)
    return unique
