"""Choose a server, send, classify what comes, try again where that is safe.

The rule: a request is sent a second time only while nothing of it can have run (``UpstreamError.untouched``),
at most once, and as far as the traffic allows for retries; another server is asked when there is one. What was
taken (the server's slot, the connection) is given back when the ``with`` ends: a connection that still carries an
answer is closed, which makes vLLM abort the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from types import TracebackType

import msgspec
from msgspec import field

from upstream.balancing.policies.policy import NO_FACTS, RequestFacts
from upstream.balancing.pool import Pool
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.connection import Connection, Headers
from upstream.http.deadlines import Deadlines, Timeouts
from upstream.http.errors import ConnectFailed, FirstByteTimeout, IdleTimeout, LocalLimit, StaleConnection, TotalTimeout, UpstreamError
from upstream.http.inline_task import Signal

MAX_ATTEMPTS = 2
_JOIN = 16 * 1024  # bytes up to which copying a body behind its head is cheaper than a second write
_HOLD = 1024 * 1024  # bytes of an answer that may wait for their reader before the server is paused

Compose = Callable[[Server], tuple[bytes, bytes]]
"""Makes the request's head and body for the server that was chosen."""

Upload = Callable[[Callable[[bytes, bool], None], Callable[[], Awaitable[bool]]], Awaitable[None]]
"""Streams the rest of a request: is given ``send(data, more)`` and ``drained()``, which waits until the server has
read on and says whether it wants more: not when it has answered already, or failed."""


class Answer(msgspec.Struct, eq=False):
    """One answer as it arrives. A ``Receiver``: the connection's callbacks end here.

    Until ``flow_to`` names a sink, bytes wait in ``pending``; afterwards what one read brought goes to the sink, all
    together, in the very callback that brought it.
    """

    _server: Server
    _connection: Connection
    _timeouts: Timeouts
    sent: float = field(default_factory=monotonic)
    last_byte: float = 0.0
    """When the last byte of the body came; 0 before the first: a head alone is no sign of life."""
    status: int = 0
    headers: Headers = field(default_factory=dict)
    content_type: bytes = b""
    """As the server sent it; ``application/json`` where it sent none."""
    pending: list[bytes] = field(default_factory=list)
    paused: bool = False
    complete: bool = False
    error: UpstreamError | None = None
    fault: UpstreamError | None = None
    """What a whole answer says of its server's failure."""
    wants_read_events: bool = True
    _sink: Callable[[bytes], None] | None = None
    _waiter: Signal | None = None
    _writable: Signal | None = None
    _uploading: bool = False
    _patience: float | None = None

    @property
    def server(self) -> ServerSpec:
        return self._server.spec

    # What the story does

    def flow_to(self, sink: Callable[[bytes], None]) -> None:
        """From now on give everything to ``sink``, what waits first."""
        self._sink = sink
        self.wants_read_events = True
        self._flush()
        self.resume()

    def keep_close(self) -> None:
        """It is a stream, of which the server is to send no more than is read (see ``Connection.keep_close``)."""
        if not self.complete:
            self._connection.limit_read_ahead()

    def divert(self, reader: Callable[[Connection], Callable[[bytes], None]]) -> None:
        """Have the connection's reads taken by the reader that this makes (see ``Connection.divert``); it is to keep ``last_byte``."""
        if not self.complete and self.error is None:
            self._connection.divert_reads(reader(self._connection))

    def _flush(self) -> None:
        """What a read brought, in one piece."""
        pending = self.pending
        if pending and self._sink is not None:
            self.pending = []
            self._sink(pending[0] if len(pending) == 1 else b"".join(pending))

    async def ended(self) -> None:
        """Wait for the end. Raises UpstreamError when the answer breaks off."""
        while not self.complete:
            await self.news()
        if self.error is not None:
            raise self.error

    async def collect(self, limit: int, patience: float | None = None) -> bytes:
        """The whole body, or its first ``limit`` bytes, or what has come of it within ``patience`` seconds: then it is cut.

        Raises UpstreamError.
        """
        kept = bytearray()

        def keep(data: bytes) -> None:
            kept.extend(data[: limit - len(kept)])
            if len(kept) >= limit:
                self.cut()

        self._patience = None if patience is None else monotonic() + patience
        self.flow_to(keep)
        await self.ended()
        return bytes(kept)

    def hurry(self, pause: float, patience: float) -> None:
        """Nobody is slow any more: what has come is enough once nothing more comes for two of these pauses, or after ``patience``
        seconds. It takes two, because after one it may be this process that stood still."""
        self._patience = monotonic() + patience
        self.resume()
        asyncio.get_running_loop().call_later(pause, self._look, pause, self.last_byte, False)

    def _look(self, pause: float, last_byte: float, was_quiet: bool) -> None:
        is_quiet = self.last_byte == last_byte
        if is_quiet and was_quiet:
            self.cut()
        elif self._wanted:
            asyncio.get_running_loop().call_later(pause, self._look, pause, self.last_byte, is_quiet)

    def cut(self) -> None:
        """What has come is enough: take it for the whole. The connection is closed."""
        if not self.complete:
            self._connection.close()
            self.on_end()

    def pause(self) -> None:
        """The reader is slow: let the server wait. The idle deadline rests meanwhile.

        Behind a whole answer there is nothing to pause: its connection may be another's by now.
        """
        if not self.complete:
            self.paused = True
            self._connection.pause_reading()

    def resume(self) -> None:
        if self.paused and not self.complete:
            self.paused = False
            self.last_byte = monotonic()
            self._connection.resume_reading()

    def fail(self, error: UpstreamError) -> None:
        """Give up on the server: whoever waits for the answer gets this error."""
        self._connection.close()
        self.on_failure(error)

    def close(self) -> None:
        """End the exchange where it is; unless it was whole, the connection goes with it."""
        self._sink = None  # it holds this, and would wait for the collector with all that belongs to the request
        if not self.complete:
            self._connection.close()

    async def upload(self, upload: Upload) -> None:
        """Stream the rest of the request, as fast as the server reads."""

        def send(data: bytes, more: bool) -> None:
            self._connection.send_more(data, more=more)
            self.sent = monotonic()

        self._uploading = True
        await upload(send, self._drained)
        self._uploading = False
        self.sent = monotonic()

    async def _drained(self) -> bool:
        while self._connection.write_paused and self._wanted:
            self._writable = Signal()
            await self._writable
        return self._wanted

    @property
    def _wanted(self) -> bool:
        return self.error is None and not self.complete

    def news(self) -> Signal:
        """To be awaited: the first bytes of the body have come, or its end. Raises the UpstreamError where there is none to wait for."""
        if self.error is not None:
            raise self.error
        self._waiter = Signal()
        return self._waiter

    # What the connection calls

    def on_headers(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.content_type = headers.get(b"content-type", b"application/json")

    def on_body(self, data: bytes) -> None:
        self.last_byte = monotonic()
        self.pending.append(data)
        if self._sink is None and len(self.pending) > 1 and sum(map(len, self.pending)) > _HOLD:
            self.pause()

    def on_read(self) -> None:
        if self._sink is not None:
            self._flush()
        elif self.pending:
            self.wants_read_events = False
            self._wake()

    def on_end(self) -> None:
        self.complete = True  # first: whoever falls behind on the rest must not pause a connection that may be another's
        if self._sink is not None:
            self._flush()
        if not self.last_byte:
            self.last_byte = monotonic()
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
        if self._writable is not None and not self._wanted:
            self.on_writable()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set()

    # What the clock calls

    def check(self, now: float) -> None:
        if self.complete or self.error is not None:
            return
        if self._patience is not None and now > self._patience:
            self.cut()
            return
        error = self._overdue(now)
        if error is not None:
            self.fail(error)

    def _overdue(self, now: float) -> UpstreamError | None:
        limits, name = self._timeouts, self.server.name
        if now - self.sent > limits.total:
            return TotalTimeout(name, f"the answer took longer than {limits.total:g} s")
        if self._uploading and not self._connection.write_paused:
            return None  # the server has read everything: it is the client that is slow
        if not self.last_byte:  # vLLM sends a stream's head before its engine has begun
            return FirstByteTimeout(name, f"no answer within {limits.first_byte:g} s") if now - self.sent > limits.first_byte else None
        if not self.paused and now - self.last_byte > limits.idle:
            return IdleTimeout(name, f"silent for more than {limits.idle:g} s in its answer")
        return None


class Attempt:
    """One request's way to an answer. ``failures`` holds every error on it, also those that a second try made good.

    ``facts``: what the pool's policy requires to know of the request.
    """

    __slots__ = ("_answer", "_deadlines", "_facts", "_pool", "_timeouts", "failures", "server", "tried")

    def __init__(self, pool: Pool, timeouts: Timeouts, deadlines: Deadlines, facts: RequestFacts = NO_FACTS) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._deadlines = deadlines
        self._facts = facts
        self.tried: list[Server] = []
        self._answer: Answer | None = None
        self.server: Server | None = None
        self.failures: list[UpstreamError] = []

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Hold against the server what it did, and give everything back."""
        answer, server = self._answer, self.server
        if answer is not None and server is not None and (error is not None or answer.fault or answer.error or server.recently_failed):
            self._judge(server, answer, error)
        self._give_back()

    def _judge(self, server: Server, answer: Answer, error: BaseException | None) -> None:
        fault = answer.fault or answer.error or (error if isinstance(error, UpstreamError) else None)
        if fault is not None:
            self._failed(server, fault)
        elif server.recently_failed and answer.complete:
            server.record_success()

    @property
    def retries(self) -> int:
        """How often the request was sent again."""
        return max(len(self.tried) - 1, 0)

    def turn_to(self, pool: Pool) -> None:
        """Choose among these servers from now on: while the request waited for one, the model's may have been started anew."""
        self._pool = pool

    async def answer(self, compose: Compose, upload: Upload | None = None) -> Answer:
        """An answer whose first bytes are here.

        Raises NoServerError when no server is up or all are full, and the UpstreamError of the last attempt.
        """
        while True:
            try:
                # A streamed body can't be sent again, and a second attempt trusts no kept connection: the next may be stale as well.
                fresh = upload is not None or bool(self.tried)
                server = self.server = self._pool.choose(self.tried, self._facts)
                self.tried.append(server)
                server.start_exchange(self._facts.tokens)
                connection = (None if fresh else server.take_idle_connection()) or await server.connect(self._timeouts.connect)
                answer = self._send(server, connection, compose, more=upload is not None)
                if upload is not None:
                    await answer.upload(upload)
                while not (answer.pending or answer.complete):
                    await answer.news()
                return answer
            except UpstreamError as error:
                self._failed(server, error)
                if not self._again(error, streamed=upload is not None):
                    raise
                self._give_back()

    def _send(self, server: Server, connection: Connection, compose: Compose, *, more: bool) -> Answer:
        answer = self._answer = Answer(server, connection, self._timeouts)
        self._deadlines.watch(answer)
        head, body = compose(server)
        if len(body) < _JOIN:
            connection.send(head + body, answer, more=more)
        else:
            connection.send(head, answer, more=True)
            connection.send_more(body, more=more)
        return answer

    def _give_back(self) -> None:
        if self._answer is not None:
            self._deadlines.forget(self._answer)
            self._answer.close()
            self._answer = None
        server, self.server = self.server, None
        if server is not None:
            server.finish_exchange(self._facts.tokens)  # another request may get its turn in there

    def _failed(self, server: Server, error: UpstreamError) -> None:
        if error not in self.failures and not isinstance(error, LocalLimit):
            self.failures.append(error)
            server.record_failure(error)

    def _again(self, error: UpstreamError, *, streamed: bool) -> bool:
        if not error.untouched or len(self.tried) >= MAX_ATTEMPTS:
            return False
        match error:
            case ConnectFailed():
                others = any(server not in self.tried for server in self._pool.servers if server.condition is Condition.UP)
                return others and self._pool.try_spend_retry()
            case StaleConnection():  # no failure of a server, so nothing to be sparing of
                return not streamed  # a part of a streamed body is gone with the first connection
        return False
