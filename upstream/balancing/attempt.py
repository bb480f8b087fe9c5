"""Send one request to a server, classify the result, and retry it if that is safe.

The rule: a request is sent again at most once, and only before the client has a byte of its response. Either no part of it can have run
(``UpstreamError.untouched``), or its server was lost and it may run twice (``resends``). The retry uses a different server if the pool has
one; a request that may have run must not return to its server. Retries after a lost connection need the retry budget. The slot and the
connection are released when the ``with`` ends. A connection that still carries a response is closed, which makes vLLM abort the request.
The exception is a request that is preempted before the first byte of a response: it releases both at once, and its caller may call ``send``
again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from types import TracebackType

import msgspec
from msgspec import field

from upstream.balancing.policies.policy import NO_FACTS, RequestFacts
from upstream.balancing.pool import Pool
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.chunked import ChunkedDecoder
from upstream.http.connection import Connection
from upstream.http.deadlines import Deadlines, Timeouts
from upstream.http.errors import (
    Aborted,
    ConnectFailed,
    Disconnected,
    EngineDead,
    FirstByteTimeout,
    IdleTimeout,
    LocalLimit,
    Moved,
    Preempted,
    StaleConnection,
    TotalTimeout,
    Unresponsive,
    UpstreamError,
)
from upstream.http.inline_task import Signal
from upstream.http.response_head import Headers

MAX_ATTEMPTS = 2
MAX_PREEMPTIONS = 2
"""How often one request may be preempted, so that it is served in the end."""
_JOIN = 16 * 1024  # bytes up to which copying a body after its headers is cheaper than a second write
_MAX_PENDING = 1024 * 1024  # bytes of a response that may wait for their reader before the server is paused

Compose = Callable[[Server], tuple[bytes, bytes]]
"""Returns the request's headers and body for the chosen server."""

Upload = Callable[[Callable[[bytes, bool], None], Callable[[], Awaitable[bool]]], Awaitable[None]]
"""Streams the rest of a request. It gets ``send(data, more)`` and ``drained()``, which waits until the server has read on and returns
whether the server wants more. The server needs no more bytes once it has responded or failed."""


class UpstreamResponse(msgspec.Struct, eq=False):
    """One response while it arrives. Implements ``Receiver``: the connection's callbacks end here.

    Bytes wait in ``pending`` until ``stream_to`` names a sink. Afterwards the bytes of one read go to the sink in one piece, in the
    callback that brought them.
    """

    _server: Server
    _connection: Connection
    _timeouts: Timeouts
    sent_at: float = 0.0
    size: int = 0
    """Bytes of the request's body."""
    last_byte_at: float = 0.0
    """The time of the last received byte of the body; 0 before the first byte.

    Headers alone do not count: vLLM sends them before its engine starts.
    """
    status: int = 0
    headers: Headers = field(default_factory=dict)
    content_type: bytes = b""
    """The content type that the server sent; ``application/json`` if it sent none."""
    pending: list[bytes] = field(default_factory=list)
    paused: bool = False
    complete: bool = False
    error: UpstreamError | None = None
    fault: UpstreamError | None = None
    """A failure of the server that a complete response reports."""
    wants_read_events: bool = True
    _sink: Callable[[bytes], None] | None = None
    _waiter: Signal | None = None
    _writable: Signal | None = None
    _uploading: bool = False
    _deadline: float | None = None
    _is_measured: bool = False
    resends: bool = False
    """The request can be sent to another server until the first byte of the body."""

    @property
    def server(self) -> ServerSpec:
        return self._server.spec

    # Called by the request handler

    def stream_to(self, sink: Callable[[bytes], None]) -> None:
        """Give everything to ``sink`` from now on, starting with the pending bytes."""
        self._sink = sink
        self.wants_read_events = True
        self._flush()
        self.resume()

    def keep_close(self) -> None:
        """Limit the bytes that the server may send ahead of the reader: the response is a stream (see ``Connection.limit_read_ahead``)."""
        if not self.complete:
            self._connection.limit_read_ahead()

    def divert(self, make_reader: Callable[[Connection, ChunkedDecoder], Callable[[bytes], None]]) -> None:
        """Pass the connection's reads of a chunked body to this reader (see ``Connection.divert_reads``). It must set ``last_byte_at``."""
        connection, chunks = self._connection, self._connection.chunks
        if chunks is not None and not self.complete and self.error is None:
            connection.divert_reads(make_reader(connection, chunks))

    def _flush(self) -> None:
        """Give the bytes of one read to the sink in one piece."""
        pending = self.pending
        if pending and self._sink is not None:
            self.pending = []
            self._sink(pending[0] if len(pending) == 1 else b"".join(pending))

    async def wait_complete(self) -> None:
        """Wait for the end of the body. Raises UpstreamError if the response is truncated."""
        while not self.complete:
            await self.next_data()
        if self.error is not None:
            raise self.error

    async def read_body(self, limit: int, timeout: float | None = None) -> bytes:
        """Read the body: its first ``limit`` bytes at most, and what arrives within ``timeout`` seconds. Raises UpstreamError."""
        body = bytearray()
        self._deadline = None if timeout is None else monotonic() + timeout
        self.stream_to(partial(self._append, body, limit))
        await self.wait_complete()
        return bytes(body)

    def _append(self, body: bytearray, limit: int, data: bytes) -> None:
        body.extend(data[: limit - len(body)])
        if len(body) >= limit:
            self.truncate()

    async def read_some(self) -> bytes:
        """Return the bytes that have arrived since the last call; empty at the end. Raises UpstreamError."""
        while not (self.pending or self.complete):
            self.wants_read_events = True
            await self.next_data()
        data, self.pending = b"".join(self.pending), []
        self.resume()
        return data

    @contextmanager
    def movable(self) -> Iterator[None]:
        """Let the server's drain end this response early: its stream can be continued on another server."""
        responses = self._server.movable
        responses.add(self)
        try:
            yield
        finally:
            responses.discard(self)

    def truncate(self) -> None:
        """Treat the received bytes as the complete response, and close the connection."""
        if not self.complete:
            self._connection.close()
            self.on_end()

    def pause(self) -> None:
        """Stop reading from the server because the client is slow. The idle deadline does not run meanwhile.

        A complete response is not touched, since its connection may already carry another response.
        """
        if not self.complete:
            self.paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        if self.paused and not self.complete:
            self.paused = False
            self.last_byte_at = monotonic()
            self._connection.resume_reading()

    def fail(self, error: UpstreamError) -> None:
        """Close the connection and raise this error in the code that awaits the response."""
        self._connection.close()
        self.on_failure(error)

    def close(self) -> None:
        """End the exchange. The connection is closed unless the response is complete."""
        self._sink = None  # it refers to this object: without this line, the garbage collector would have to free the request
        if not self.complete:
            self._connection.close()

    async def upload(self, upload: Upload) -> None:
        """Stream the rest of the request, as fast as the server reads."""
        self._uploading = True
        await upload(self._send_more, self._drained)
        self._uploading = False
        self.sent_at = monotonic()

    def _send_more(self, data: bytes, more: bool) -> None:
        self._connection.send_more(data, more=more)
        self.sent_at = monotonic()

    async def _drained(self) -> bool:
        while self._connection.write_paused and self._is_wanted:
            self._writable = Signal()
            await self._writable
        return self._is_wanted

    @property
    def _is_wanted(self) -> bool:
        return self.error is None and not self.complete

    def next_data(self) -> Signal:
        """Return a signal that is set by the first bytes of the body, its end or its failure. Raises UpstreamError after a failure."""
        if self.error is not None:
            raise self.error
        self._waiter = Signal()
        return self._waiter

    # Called by the connection

    def on_headers(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.content_type = headers.get(b"content-type", b"application/json")

    def on_body(self, data: bytes) -> None:
        self.last_byte_at = monotonic()
        self.pending.append(data)
        if self._sink is None and len(self.pending) > 1 and sum(map(len, self.pending)) > _MAX_PENDING:
            self.pause()

    def on_read(self) -> None:
        if self._sink is not None:
            self._flush()
        elif self.pending:
            self.wants_read_events = False
            self._wake()

    def on_end(self) -> None:
        self.complete = True  # first: a slow client must not pause a connection that may carry another response by then
        if self._sink is not None:
            self._flush()
        if not self.last_byte_at:
            self.last_byte_at = monotonic()
        self._wake()

    def on_failure(self, error: UpstreamError) -> None:
        self._flush()
        self.error = error
        self._wake()

    def on_writable(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None:
            writable.set()

    def _wake(self) -> None:
        if self._writable is not None and not self._is_wanted:
            self.on_writable()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set()

    # Called by the clock

    def check(self, now: float) -> None:
        if self.complete or self.error is not None:
            return
        if self._deadline is not None and now > self._deadline:
            self.truncate()
            return
        self._report_progress(now)
        error = self._overdue(now)
        if error is not None:
            self.fail(error)

    def _report_progress(self, now: float) -> None:
        """Report to the server whether bytes arrive. So an engine that has stopped is detected."""
        server = self._server
        server.waited_for = True
        if self.paused or self._uploading:
            server.last_byte_at = now
        elif not self.last_byte_at:
            server.waiting_bytes += self.size
            if self.resends:
                server.movable.add(self)
        else:
            server.last_byte_at = max(server.last_byte_at, self.last_byte_at)
            if not self._is_measured and self.content_type.startswith(b"text/event-stream"):
                server.measure_prefill(self.size, self.last_byte_at - self.sent_at)
            self._is_measured = True

    def _overdue(self, now: float) -> UpstreamError | None:
        limits, name = self._timeouts, self.server.name
        if now - self.sent_at > limits.total:
            return TotalTimeout(name, f"the response took longer than {limits.total:g} s")
        if self._uploading and not self._connection.write_paused:
            return None  # the server has read everything: the client is slow
        if not self.last_byte_at:
            return FirstByteTimeout(name, f"no response within {limits.first_byte:g} s") if now - self.sent_at > limits.first_byte else None
        if not self.paused and now - self.last_byte_at > limits.idle:
            return IdleTimeout(name, f"silent for more than {limits.idle:g} s in its response")
        return None


class Attempt:
    """One request's way to a response, over one or two servers of a pool.

    ``failures`` contains every error, including errors before a successful retry. ``composed_at`` is when the request was first
    composed. ``avoided`` are servers that are chosen only if no other one is left. ``facts`` is what the pool's policy needs to know about
    the request. ``streams``: the response is a stream, whose first byte is awaited. ``resends``: a request that a server may have run can
    be sent to another server.
    """

    __slots__ = (
        "_deadlines",
        "_pool",
        "_resends",
        "_response",
        "_streams",
        "_timeouts",
        "avoided",
        "composed_at",
        "facts",
        "failures",
        "preemptions",
        "server",
        "tried",
    )

    def __init__(
        self,
        pool: Pool,
        timeouts: Timeouts,
        deadlines: Deadlines,
        facts: RequestFacts = NO_FACTS,
        *,
        streams: bool = False,
        resends: bool = False,
    ) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._deadlines = deadlines
        self.facts = facts
        self._streams = streams
        self._resends = resends
        self.tried: list[Server] = []
        self.avoided: Sequence[Server] = ()
        self._response: UpstreamResponse | None = None
        self.server: Server | None = None
        self.failures: list[UpstreamError] = []
        self.composed_at: float | None = None
        self.preemptions = 0

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Record the server's success or failure, and release everything."""
        response, server = self._response, self.server
        if response is not None and server is not None:
            failure = response.fault or response.error or (error if error is not None and isinstance(error, UpstreamError) else None)
            if failure is not None:
                self._record_failure(server, failure)
            elif server.recently_failed and response.complete:
                server.record_success()
        self._release()

    @property
    def retries(self) -> int:
        """The number of retries."""
        return max(len(self.tried) - 1, 0)

    def replace(self, lost: Attempt) -> None:
        """Continue for an attempt whose server was lost: on other servers, if the pool has any."""
        self.avoided = (*lost.avoided, *lost.tried)
        self.failures, self.composed_at, self.facts = lost.failures, lost.composed_at, lost.facts

    @property
    def may_have_run(self) -> bool:
        """Whether a server that failed may have run the request."""
        return not all(error.untouched for error in self.failures)

    def use_pool(self, pool: Pool) -> None:
        """Choose from this pool from now on: a reload may have replaced the model's servers while the request was queued."""
        self._pool = pool

    def preemptible_for(self, tier: int) -> bool:
        """Return whether the request has sent nothing to its client, and a request of this tier could have its slot."""
        response, server = self._response, self.server
        if response is None or server is None or self.preemptions >= MAX_PREEMPTIONS:
            return False
        return not response.last_byte_at and not response.complete and response.error is None and server.would_serve(tier)

    @property
    def sent_at(self) -> float:
        """When the request was sent last."""
        return 0.0 if self._response is None else self._response.sent_at

    def preempt(self) -> None:
        """Stop the request at its server. ``send`` releases its slot and raises Preempted, and may be called again."""
        if self._response is not None:
            self.preemptions += 1
            self._response.fail(Preempted(self._response.server.name, "stopped for a more urgent request"))

    async def send(self, compose: Compose, upload: Upload | None = None) -> UpstreamResponse:
        """Send the request, and return its response when the first bytes of the body have arrived.

        Raises NoServerError if no server is up or all are at capacity, Preempted, and the UpstreamError of the last attempt.
        """
        while True:
            try:
                # A streamed body can't be sent again, and a second attempt uses a new connection: another idle one may be stale as well.
                may_reuse = upload is None and not self.tried
                server = self.server = self._pool.choose((*self.avoided, *self.tried) if self.avoided else self.tried, self.facts)
                self.tried.append(server)
                server.start_exchange(self.facts.tier)
                connection = (server.take_idle_connection() if may_reuse else None) or await server.connect(self._timeouts.connect)
                response = self._start(server, connection, compose, more=upload is not None)
                if upload is not None:
                    await response.upload(upload)
                while not (response.pending or response.complete):
                    await response.next_data()
                if response.resends:
                    server.movable.discard(response)
                if self.facts.prompt is not None:
                    self.facts.prompt.responded()
                return response
            except UpstreamError as error:
                if not self.may_resend(error, streamed=upload is not None):
                    raise

    def _start(self, server: Server, connection: Connection, compose: Compose, *, more: bool) -> UpstreamResponse:
        response = self._response = UpstreamResponse(server, connection, self._timeouts)
        self._deadlines.watch(response)
        headers, body = compose(server)
        response.sent_at = now = monotonic()
        response.size = len(body)
        response.resends = self._resends and not more and len(self.tried) < MAX_ATTEMPTS
        if self.composed_at is None:
            self.composed_at = now
        if len(body) < _JOIN:
            connection.send(headers + body, response, more=more, at_once=self._streams)
        else:
            connection.send(headers, response, more=True)
            connection.send_more(body, more=more)
        return response

    def _release(self) -> None:
        response = self._response
        if response is not None:
            self._deadlines.forget(response)
            if response.resends:
                response._server.movable.discard(response)
            response.close()
            self._response = None
        server, self.server = self.server, None
        if server is not None:
            server.finish_exchange(self.facts.tier)  # this call may start a queued request

    def _record_failure(self, server: Server, error: UpstreamError) -> None:
        if isinstance(error, Preempted):
            self._end_preempted()
        elif error not in self.failures and not isinstance(error, LocalLimit | Moved):
            self.failures.append(error)
            server.record_failure(error)

    def _end_preempted(self) -> None:
        """Forget the server, as if the request had not been sent."""
        self.tried.clear()
        if self.facts.prompt is not None and self.facts.prompt.placement is not None:
            self.facts.prompt.placement.finished()

    def may_resend(self, error: UpstreamError, *, streamed: bool) -> bool:
        """Record a failure, release its server, and return whether the request may be sent again. Nothing was sent to the client so far.

        ``streamed``: a part of the request was uploaded, and is lost.
        """
        if self.server is not None:
            self._record_failure(self.server, error)
        self._release()  # before the check of other servers' slots: this may start queued requests
        return self._may_retry(error, streamed=streamed)

    def _may_retry(self, error: UpstreamError, *, streamed: bool) -> bool:
        if len(self.tried) >= MAX_ATTEMPTS:
            return False
        if isinstance(error, StaleConnection):  # not a failure of the server, so the retry budget does not apply
            return not streamed  # a part of a streamed body is lost with the first connection
        if isinstance(error, Moved | Unresponsive):  # only of a response that ``resends``, while another server has a slot
            return True
        others = [server for server in self._pool.servers if server not in self.tried and server.condition is Condition.UP]
        if isinstance(error, Disconnected | EngineDead | Aborted) and self._resends and not streamed:
            others = [server for server in others if server.available_for(self.facts.tier)]  # otherwise the same server may be chosen
        elif not isinstance(error, ConnectFailed):
            return False
        return bool(others) and self._pool.try_spend_retry()
