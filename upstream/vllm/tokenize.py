"""Request the token IDs of a prompt from a server, within bounds of time, number and memory.

The rules: a failure is never an error of the request, which then does without token IDs. After several failures in a row,
nothing is requested for a while. At most ``CONCURRENCY`` requests wait at the same time. The IDs of the last prompts are stored, because
clients repeat requests.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from time import monotonic

import msgspec

from upstream.balancing.server import Server
from upstream.http.connection import Connection, Headers
from upstream.http.deadlines import Deadlines
from upstream.http.errors import StaleConnection, UpstreamError
from upstream.http.inline_task import Signal

PATH = "/tokenize"
TIMEOUT = 0.5
"""Seconds for a response; a deadline is up to a tick late. It takes milliseconds unless the server's main process is overloaded."""
CONCURRENCY = 64
PAUSE = 5.0
"""Seconds without a request after ``_FAILURES`` failures in a row."""
STORED_TOKENS = 2_000_000
"""Token IDs of earlier prompts, of 4 bytes each."""
_ENTRY = 64  # token IDs that take as much memory as an entry without any
_FAILURES = 5
_RESPONSE_LIMIT = 16 << 20  # bytes


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Tokenization:
    """Requests token IDs from the servers of a worker's models. ``deadlines``: the worker's clock."""

    def __init__(self, deadlines: Deadlines, timeout: float = TIMEOUT, stored_tokens: int = STORED_TOKENS) -> None:
        self._deadlines = deadlines
        self._timeout = timeout
        self._stored_tokens = stored_tokens
        self._stored: OrderedDict[bytes, array[int]] = OrderedDict()
        self._size = 0
        self._waiting = 0
        self._failures = 0
        self._paused_until = 0.0
        self._decoder = msgspec.json.Decoder(_Tokens)

    async def token_ids(self, server: Server, body: bytes) -> Sequence[int] | None:
        """Return the token IDs for the body of a request to ``/tokenize``; None if they are not known in time."""
        digest = blake2b(body, digest_size=16).digest()
        found = self._stored.get(digest)
        if found is not None:
            self._stored.move_to_end(digest)
            return found
        if self._waiting >= CONCURRENCY or monotonic() < self._paused_until:
            return None
        self._waiting += 1
        try:
            ids = await self._request(server, body)
        finally:
            self._waiting -= 1
        if ids is None:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._paused_until = monotonic() + PAUSE
        else:
            self._failures = 0
            self._store(digest, ids)
        return ids

    async def _request(self, server: Server, body: bytes) -> array[int] | None:
        deadline = monotonic() + self._timeout
        response = None
        try:
            if (idle := server.take_idle_connection()) is not None:
                response = await self._exchange(server, idle, body, deadline)
            if response is None or isinstance(response.error, StaleConnection):
                response = await self._exchange(server, await server.connect(self._timeout), body, deadline)
        except UpstreamError:
            return None
        try:
            return array("I", self._decoder.decode(response.body).tokens) if response.status == 200 and response.complete else None
        except (msgspec.DecodeError, OverflowError):
            return None

    async def _exchange(self, server: Server, connection: Connection, body: bytes, deadline: float) -> _Response:
        """Send the request over one connection, and wait for the end of the response."""
        response = _Response(connection, deadline)
        self._deadlines.watch(response)
        try:
            connection.send(
                b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (server.request_head(PATH), len(body)) + body, response
            )
            await response.ended
        finally:
            self._deadlines.forget(response)
            response.close()
        return response

    def _store(self, digest: bytes, ids: array[int]) -> None:
        if digest in self._stored:
            return  # an equal request was faster
        self._stored[digest] = ids
        self._size += len(ids) + _ENTRY
        while self._size > self._stored_tokens:
            _, oldest = self._stored.popitem(last=False)
            self._size -= len(oldest) + _ENTRY


class _Response:
    """A response while it arrives: a ``Receiver``, and watched by the clock."""

    wants_read_events = False

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self.status = 0
        self.body = bytearray()
        self.complete = False
        self.error: UpstreamError | None = None
        self.ended = Signal()

    def on_headers(self, status: int, _: Headers) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > _RESPONSE_LIMIT:
            self._fail()

    def on_read(self) -> None:
        """Do nothing: the body is read to its end."""

    def on_end(self) -> None:
        self.complete = True
        self.ended.set()

    def on_failure(self, error: UpstreamError) -> None:
        self.error = error
        self.ended.set()

    def on_writable(self) -> None:
        """Do nothing: the request was sent in one piece."""

    def check(self, now: float) -> None:
        if now > self._deadline and not self.complete:
            self._fail()

    def close(self) -> None:
        """Close the connection unless the response is complete: it may already carry another one."""
        if not self.complete:
            self._connection.close()

    def _fail(self) -> None:
        self._connection.close()
        self.ended.set()
