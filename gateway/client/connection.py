"""Client connections of the data port: transports, keep-alive and pipelining.

Bytes from the transport go through ``http.framing``. A POST to an inference route becomes a ``ClientRequest``. Its handler reads and writes
it directly, so that a chunk goes from the server's callback to the client's transport without ASGI messages and task switches. Every other
request becomes an ``AsgiRequest``.

The rules: one request is received and answered before the next one is parsed. A handler runs before more than ``AHEAD`` bytes of its
request's body are received: so memory has an owner before it is used. Bytes after a request stay in the kernel,
except those of one read. A disconnect cancels the request at once. While such bytes wait, the event loop does not report it, and it is
noticed within a second. Bytes that are not a request are refused, and parsing stops. Every wait for the client has a timeout
(``timeouts``).
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress

from gateway.api.errors import Refusal, render
from gateway.client.addresses import shown_address
from gateway.client.asgi import AsgiRequest
from gateway.client.body import RequestBody
from gateway.client.connection_context import ConnectionContext
from gateway.client.flow_control import FlowControl
from gateway.client.http.framing import BodyReceiver, HttpParser, Reading
from gateway.client.http.head import FORWARDED, MAX_HEAD, RequestHead
from gateway.client.http.status_lines import STATUS_LINES
from gateway.client.request import ClientRequest, Handler
from gateway.client.timeouts import Wait, WaitTimer
from gateway.system.addresses import counted_client
from upstream.http.inline_task import InlineTask
from upstream.http.write_batching import BatchingTransport

LINGER = 2.0
"""Seconds for which the rest of a refused body is read and discarded, so that the client can read the response."""
_UNAUTHORIZED = 401
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing resets the connection (socket(7))
_FAULTS: Mapping[Wait, str] = {
    Wait.FIRST_BYTE: "silent",
    Wait.HEAD: "slow_head",
    Wait.BODY: "slow_body",
    Wait.REST: "slow_body",
    Wait.READER: "slow_reader",
}
"""The reasons under which timeouts are counted. An idle connection is not a fault."""
_WAITS: Mapping[Reading, Wait] = {
    Reading.FIRST_REQUEST: Wait.FIRST_BYTE,
    Reading.HEAD: Wait.HEAD,
    Reading.NEXT_REQUEST: Wait.NEXT_REQUEST,
    Reading.NOTHING: Wait.NOTHING,
}


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_counted_client", "_handle_request", "_inference", "_lingering", "_sends_ahead", "_timer", "address", "client", "current",
        "deferred", "flow", "parser", "proxied", "scheme", "transport", "worker",
    )  # fmt: skip
    transport: BatchingTransport
    flow: FlowControl

    def __init__(self, worker: ConnectionContext, handle_request: Handler) -> None:
        self.worker = worker
        self._handle_request = handle_request
        self.parser = HttpParser(self)
        self.deferred: Callable[[], None] | None = None
        """Starts or resumes a handler after the parser has returned: handlers never run inside the parser."""
        self.current: ClientRequest | AsgiRequest | None = None
        """The last request that has been started."""
        self._inference: ClientRequest | None = None  # the same, of inference requests
        self._lingering = False  # no further request is served
        self._sends_ahead = False  # more bytes may have arrived: the kernel resets a connection that is closed with unread bytes
        self._timer = WaitTimer()
        # The other end
        self.client: tuple[str, int] | None = None
        self.scheme = "http"
        self.address = ""
        """The IP address of the other end, empty on a Unix socket."""
        self.proxied = False
        """The other end is a trusted proxy, which reports the client's address."""
        self._counted_client: str | None = None

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection. A client that has too many is refused."""
        worker = self.worker
        self.transport = BatchingTransport(transport, worker.write_batch)  # type: ignore[arg-type]  # both loops give a full Transport here
        self.flow = FlowControl(self.transport)
        sock = transport.get_extra_info("socket")
        self.client = _remote_address(sock)
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.address = shown_address(self.client[0]) if self.client else ""
        self.proxied = worker.active.proxies.trusts(self.address)
        worker.connections.add(self)
        worker.unauthenticated.relieve(sock.fileno())
        worker.unauthenticated.add(self)
        most = worker.active.snapshot.clients.max_per_address
        if most is not None and not self.proxied:
            client = counted_client(self.address)
            if worker.addresses.add(client, most):
                self._counted_client = client
            else:
                worker.metrics.count_client_fault("too_many")
                self._reject_connection()
                return
        if self.scheme == "http":
            self._read_first(sock.fileno())

    def _read_first(self, descriptor: int) -> None:
        """Read the bytes that have arrived already. The event loop of a busy worker would read them milliseconds later."""
        try:
            data = os.read(descriptor, MAX_HEAD)
        except OSError:
            return  # nothing has arrived, or the connection is lost, which the event loop notices
        if data:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and run the handlers that they start or resume."""
        parser = self.parser
        try:
            parser.feed(data)
        except Refusal as refusal:
            if not self._lingering:  # else it was refused already
                self.worker.metrics.count_client_fault("malformed")
            self._end_with(refusal)
        if self.deferred is not None:
            self._run_deferred()
        if parser.is_blocked and parser.stored and parser.reading is not Reading.BODY:
            self._hold_reading()

    def _hold_reading(self) -> None:
        """Stop reading: the bytes after the current request count as memory of its key, and no more of them are received."""
        request = self.current
        self._sends_ahead = True
        self.flow.hold_reading()
        if isinstance(request, ClientRequest) and not request.body.hold(len(self.parser.stored)):
            self.parser.stop()
            request.keep_alive = False

    def _parse_stored(self) -> None:
        """Parse the rest of a body, or the bytes that were received after the request that has just been answered."""
        is_body = self.parser.reading is Reading.BODY
        if self.parser.is_blocked and not is_body:
            return
        if self.flow.write_paused and not is_body:
            self.flow.pause_reading()  # until the client has read its responses
        elif self.parser.stored and not self.transport.is_closing():
            self.flow.reading_held = False
            self.data_received(b"")
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Pause the source of the response: the client reads too slowly."""
        self.flow.pause_writing()
        if self.current is not None:
            self.current.pause()

    def resume_writing(self) -> None:
        """Resume the source of the response, and reading."""
        self.flow.resume_writing()
        self.flow.resume_reading()
        if self.current is not None:
            self.current.resume()
        self._parse_stored()

    def eof_received(self) -> None:
        """Send what is buffered, and cancel the request.

        The transport closes after this call, and would drop the bytes of counted tokens.
        """
        self.transport.flush()
        self._cancel_request()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  nothing depends on the reason
        """Cancel the request of the connection, and release it."""
        worker = self.worker
        self.transport.mark_closed()
        self._cancel_request()
        self.flow.resume_writing()
        self.parser.close()
        worker.connections.discard(self)
        worker.connection_closed()
        worker.unauthenticated.remove(self)
        if self._counted_client is not None:
            worker.addresses.remove(self._counted_client)
        self.current = self._inference = None  # they refer to this object, and would wait for the garbage collector

    def _cancel_request(self) -> None:
        if self.current is not None:
            self.current.disconnect()

    # Requests

    def request_received(self, head: RequestHead) -> BodyReceiver:
        """Start a request. Raises Refusal if its target is not a path."""
        worker = self.worker
        active = worker.active
        targets = active.catalog.targets
        target = targets.get(head.url) or targets.get(head.url.partition(b"?")[0])
        keep_alive = head.keep_alive and worker.keep_alive
        if target is None or head.method != b"POST":
            other = AsgiRequest(self, head, keep_alive and not head.http10)
            self.parser.is_blocked = True
            self._start_other(other)
            return other
        limit = active.snapshot.body_limit
        too_large = (head.content_length or 0) > limit
        body = RequestBody(self, head, limit, active.body_allowance, target.route.takes_form, too_large)
        self.parser.is_blocked = True
        request = ClientRequest(self, target, next(worker.request_ids), head, body, keep_alive)
        self.current = self._inference = request
        request.handler = handler = InlineTask(self._handle_request(request))
        worker.handlers.add(handler)
        self.deferred = handler.step
        return body

    def body_follows(self) -> None:
        """Run the handler up to its wait for the body: it authenticates the request, so the body has an owner."""
        self._run_deferred()

    def body_stored(self) -> None:
        """Decode the rest of the chunks that have been received in a later event-loop iteration."""
        self.flow.hold_reading()
        asyncio.get_running_loop().call_soon(self._parse_stored)

    def response_finished(self, *, keep_alive: bool, body_complete: bool) -> None:
        """Serve the next request, or close: the current request's response has been written."""
        self.parser.is_blocked = False
        if not keep_alive:
            if body_complete and not self._sends_ahead:
                self.transport.close()
            else:
                self.linger()
        elif self.parser.stored or self.flow.write_paused:
            asyncio.get_running_loop().call_soon(self._parse_stored)

    def _start_other(self, request: AsgiRequest) -> None:
        self.current = request
        handlers = self.worker.handlers
        task = asyncio.get_running_loop().create_task(request.run(self.worker.other_routes))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    def _run_deferred(self) -> None:
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            deferred()

    def client_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the address of the client that sent a request, as far as it is known."""
        return self.worker.active.proxies.client(self.address, headers.get(FORWARDED, b"")) if self.proxied else self.address

    # Closing

    def shutdown(self) -> None:
        """Close the connection when the current request has been answered."""
        if self.is_idle or self.current is None:
            self.transport.close()
        else:
            self.current.keep_alive = False

    def close(self) -> None:
        """Close the connection after all written bytes have been sent."""
        self.transport.close()

    def linger(self) -> None:
        """Read and discard the rest of a body after the response for a while, then close (RFC 9112, section 9.6)."""
        self._lingering = self.parser.is_last = True
        self.flow.resume_reading()
        asyncio.get_running_loop().call_later(LINGER, self.transport.close)

    def cut(self) -> None:
        """Close immediately, in the middle of a response.

        An HTTP/1.0 client may treat the end of the connection as the end of the response, so its connection is reset.
        """
        if self.current is not None and self.current.head.http10:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def evict(self) -> None:
        """Close immediately, to free the file descriptor."""
        self.worker.metrics.count_client_fault("evicted")
        self.transport.abort()

    @property
    def has_valid_key(self) -> bool:
        """Whether the last inference request had a valid key. A request without one is refused at once."""
        return self._inference is not None and self._inference.status != _UNAUTHORIZED

    @property
    def server(self) -> tuple[str, int | None] | None:
        """The IP address and port of this end, or the path of a Unix socket and None."""
        address = self.transport.get_extra_info("socket").getsockname()
        if isinstance(address, tuple):
            return str(address[0]), int(address[1])
        return (address, None) if isinstance(address, str) else None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served."""
        return self.current is None or self.current.response_complete

    # Timeouts

    @property
    def is_awaited(self) -> bool:
        """Whether a first request, or the rest of a request line and headers, may still arrive."""
        return self.parser.reading in (Reading.FIRST_REQUEST, Reading.HEAD) and not self._lingering and not self.transport.is_closing()

    def check(self, now: float) -> None:
        """Close the connection if the client has kept it waiting for too long. Called about once a second with ``time.monotonic``."""
        if self.flow.reading_held:
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
            if poll.poll(0):  # the client has disconnected although not all of its bytes have been read (poll(2))
                self.transport.abort()
                return
        wait, message, moved = self._awaited()
        if not self._timer.has_expired(wait, message, moved, now, self.worker.active.snapshot.clients):
            return
        if wait in _FAULTS:
            self.worker.metrics.count_client_fault(_FAULTS[wait])
        if wait is Wait.READER:
            self.cut()
        elif wait in (Wait.HEAD, Wait.BODY):
            self._end_with(Refusal("request_timeout", "The request was not sent in time."))
            self._run_deferred()
        else:
            self.transport.close()

    def _awaited(self) -> tuple[Wait, object, int]:
        """Return what the connection waits for, in which request, and how many bytes of it have moved."""
        unsent, parser = self.transport.get_write_buffer_size(), self.parser
        if unsent:
            return Wait.READER, None, (0 if self.current is None else self.current.bytes_out) - unsent
        if self._lingering or self.transport.is_closing():
            return Wait.NOTHING, None, 0
        receiver = parser.receiver
        if receiver is not None and receiver.is_awaited and not self.flow.read_paused:
            return Wait.BODY, receiver, receiver.size
        if not self.is_idle:
            return Wait.NOTHING, None, 0
        return (_WAITS[parser.reading] if receiver is None else Wait.REST), parser.number, 0

    # Refusals

    def write_refusal(self, refusal: Refusal, *, with_body: bool = True) -> None:
        """Write the response to what is not an inference request. It closes the connection."""
        body, worker = render(refusal), self.worker
        identity, status = next(worker.request_ids).encode(), STATUS_LINES[refusal.spec.status]
        lines = b"content-type: application/json\r\nx-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n" % (identity, len(body))
        own = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers.items()).encode()
        self.transport.write(b"%b%b%b%b\r\n%b" % (status, lines, worker.date_line, own, body if with_body else b""))

    def _reject_connection(self) -> None:
        """Refuse the connection with one write. With TLS it is cut: a handshake and its end would take longer."""
        self._lingering = True
        self.parser.stop()
        if self.scheme == "https":
            self.transport.abort()
            return
        with suppress(OSError):  # the kernel resets a connection that is closed with unread bytes, and the response would be lost
            os.read(self.transport.get_extra_info("socket").fileno(), MAX_HEAD)
        self.write_refusal(Refusal("rate_limit_exceeded", "There are too many connections from this address."))
        self.transport.close()

    def _end_with(self, refusal: Refusal) -> None:
        """Serve no further request: answer the earlier requests in order, then refuse and close."""
        receiver = self.parser.receiver
        self.parser.stop()
        if self._lingering:
            return
        self._lingering = True
        if receiver is not None:
            receiver.fail(refusal)  # the response to that request is the last one
        elif not self.transport.is_closing():
            self.write_refusal(refusal)
            self.linger()


def _remote_address(sock: socket.socket) -> tuple[str, int] | None:
    """Return the IP address and port of the other end; None on a Unix socket, and if the client has disconnected already."""
    try:
        address = sock.getpeername()
    except OSError:
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
