"""One inference request as its handler sees it: its headers, its body, and the response to its client.

The rules: a response starts once and ends once, and a connection whose response cannot be completed is closed. When the client
disconnects, in any state, the request's handler is cancelled immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import msgspec
from msgspec import field

from gateway.auth.catalog import Target
from gateway.client.body import RequestBody
from gateway.client.connection_context import ResponseConnection
from gateway.client.http.head import RequestHead
from gateway.client.http.status_lines import STATUS_LINES
from gateway.limits import Reservation
from gateway.limits.response_headers import reservation_lines
from gateway.telemetry.trace import Trace
from upstream.http.inline_task import InlineTask

_SENT_WITHOUT_COPY = 256 * 1024  # bytes of a response from which its body is not appended to its headers


class ClientRequest(msgspec.Struct, eq=False):
    """One inference request and its response."""

    connection: ResponseConnection
    target: Target
    id: str
    head: RequestHead
    body: RequestBody
    keep_alive: bool
    received_at: float = field(default_factory=monotonic)
    trace: Trace | None = None
    """The request's position in its trace, if it is traced."""
    reservation: Reservation | None = None
    """The request's reservation from its key's limits, if the key has limits."""
    handler: InlineTask | None = None
    disconnected: bool = False
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
        return len(self.connection.worker.handlers)

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
        if size < _SENT_WITHOUT_COPY:
            self.connection.transport.write(head + body)
        else:
            self.connection.transport.writelines((head, body))
        self.response_complete = self.body.abandoned = True
        self.connection.response_finished(keep_alive=self.keep_alive, body_complete=self.body.complete)

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
        self._put(self._head(status, headers, framing), body, at_once=event_stream)

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
        self.response_complete = self.body.abandoned = True
        self.connection.response_finished(keep_alive=self.keep_alive, body_complete=self.body.complete)

    def abort(self) -> None:
        """Cut the connection, so that the client does not treat a truncated response as complete."""
        self.response_complete = self.body.abandoned = True
        self.connection.cut()

    def release(self) -> None:
        """Release the resources of the request: its handler has finished."""
        self.body.release()
        self.connection.worker.handlers.discard(self.handler)

    def _head(self, status: int, headers: bytes, framing: bytes) -> bytes:
        self.response_started = True
        self.status = status
        if not self.body.complete:
            self.keep_alive = self.body.is_awaited = False  # the rest of the body is discarded, and the connection closed
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif self.head.http10:
            framing += b"connection: keep-alive\r\n"
        worker = self.connection.worker
        if b"origin" in self.head.headers:
            framing += worker.active.cors.lines(self.head.headers[b"origin"])
        if self.extra_headers:
            framing += self.extra_headers
        if self.reservation is not None:
            framing += reservation_lines(self.reservation)
        identity = self.id.encode()
        if self.target.route.anthropic:
            framing += b"request-id: %b\r\n" % identity  # the name that Anthropic's clients read
        return b"%bx-request-id: %b\r\n%b%b%b\r\n" % (STATUS_LINES[status], identity, headers, framing, worker.date_line)

    def _put(self, head: bytes, data: bytes, *, at_once: bool = False) -> None:
        self.bytes_out += len(data)
        framed = b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked and data else head + data
        if at_once:
            self.connection.transport.write_at_once(framed)
        else:
            self.connection.transport.write(framed)

    # For the connection

    def pause(self) -> None:
        """Pause the source of the response."""
        if self.on_pause is not None and not self.response_complete:
            self.on_pause()

    def resume(self) -> None:
        """Resume the source of the response."""
        if self.on_resume is not None and not self.response_complete:
            self.on_resume()

    def disconnect(self) -> None:
        """Cancel the handler, once: the client has disconnected. The handler may then still read the end of a response for its usage."""
        if not self.response_complete and not self.disconnected:
            self.disconnected = True
            if self.handler is not None:
                self.handler.cancel()
            else:
                self.body.release()


Handler = Callable[[ClientRequest], Coroutine[Any, Any, None]]
"""Serves one inference request to its end."""
