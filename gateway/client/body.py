"""The body of one inference request: received from the parser, read by the request's handler.

The rules: bytes beyond the limit are never stored, and those beyond the allowance only while ``BodyMemory`` has room for them. Memory is
reserved for the key that was authenticated, and for bytes that have arrived. A form is streamed to a server and received as fast as the
server reads it.
"""

from __future__ import annotations

import msgspec

from gateway.admission.body_memory import FREE
from gateway.api.errors import Refusal
from gateway.client.connection_context import Connection
from gateway.client.http.head import RequestHead
from upstream.http.inline_task import Signal

_UPLOAD_AHEAD = 256 * 1024  # bytes of a form that may wait for the server
_PIECE = 16 * 1024  # bytes of a form that are processed in one event-loop iteration
_MORE = 4  # the part of the received bytes for which memory is reserved in advance: a fourth, as much as a growing buffer takes


class RequestBody(msgspec.Struct, eq=False):
    """The body of one request."""

    connection: Connection
    head: RequestHead
    limit: int
    """Bytes that the body may have."""
    allowance: int
    """Bytes that it may have before memory is reserved for more."""
    is_form: bool
    """The body is streamed to a server as it arrives."""
    dropped: bool
    """The rest of the body is not stored, because the body is larger than its limit or was refused."""
    owner: str = ""
    """The ID of the key for which memory is reserved. It is known before a body is received that needs memory."""
    size: int = 0
    """Bytes received."""
    complete: bool = False
    """All of the body has been received."""
    is_awaited: bool = False
    """The handler waits for the body, so the client's timeout counts."""
    abandoned: bool = False
    """The response is complete: the rest of the body is received and discarded, then the connection is closed."""
    _buffer: bytes | bytearray = b""
    _has_more: bool = False
    _ahead: bool = False
    _waiter: Signal | None = None
    _solicited: bool = False
    _streams_on: bool = False
    _reserved: int = 0
    _reserved_for: str = ""
    _refusal: Refusal | None = None

    # For the handler

    async def read(self) -> bytes | bytearray:
        """Return the whole body, once. Raises Refusal request_too_large beyond the limit, and overloaded if there is no memory for it."""
        if not self.complete:
            self._solicit()
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
        self._solicit()
        if self._has_more:
            await self.connection.worker.steps.pause()
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
        """Forward later bytes to a server instead of storing them. They need no memory reservation."""
        self._streams_on = True

    def read_ahead(self) -> None:
        """Receive a form up to its limit before it is read, so that a disconnect is noticed while the request is queued."""
        self._ahead = True
        self.allowance = min(self.allowance, max(self.size, FREE))
        if self.connection.flow.read_paused:
            self.connection.flow.resume_reading()

    def reserve(self, size: int) -> None:
        """Raise the reservation to ``size`` bytes if less is reserved. Raises Refusal overloaded."""
        if size <= self._reserved or size <= FREE:
            return
        owner = self._reserved_for if self._reserved else self.owner
        if not self.connection.worker.memory.reserve(size - self._reserved, owner, more=self._reserved > 0):
            raise _no_memory()
        self._reserved_for, self._reserved = owner, size

    def hold(self, size: int) -> bool:
        """Reserve memory for ``size`` bytes that were received after the body. Returns False if it is used up."""
        try:
            self.reserve(self.size + size)
        except Refusal:
            return False
        return True

    def release(self) -> None:
        """Return the memory."""
        if self._reserved:
            self.connection.worker.memory.release(self._reserved, self._reserved_for)
            self._reserved = 0

    # For the connection

    def feed(self, data: bytes) -> None:
        """Store the next bytes of the body."""
        if self.dropped or self.abandoned:
            return
        size = self.size = self.size + len(data)
        if size > self.allowance and not self._may_have(size):
            return
        if not (buffer := self._buffer):
            self._buffer = data
        elif type(buffer) is bytearray:
            buffer += data
        else:
            self._buffer = bytearray(buffer) + data
        if self.is_form:
            if len(self._buffer) > _UPLOAD_AHEAD and not self._ahead:
                self.connection.flow.pause_reading()  # until the server has taken more
            self._wake()

    def finish(self) -> None:
        """Note that all of the body has been received."""
        self.complete, connection = True, self.connection
        if connection.flow.read_paused:
            connection.flow.resume_reading()
        if self._waiter is not None:
            self._wake()
        if self.abandoned:
            connection.close()

    def refuse(self, refusal: Refusal) -> None:
        """Store nothing more. Reading the body raises the refusal."""
        self._refusal = refusal
        self._drop()

    fail = refuse

    def _drop(self) -> None:
        """Store nothing more."""
        self.dropped, self.is_awaited = True, False
        self._buffer = b""
        self._wake()

    def _solicit(self) -> None:
        """Start the body's timeout, and send ``100 Continue`` to a client that waits for it."""
        if self._solicited:
            return
        self._solicited = self.is_awaited = True
        length = self.head.content_length or 0
        if length > self.allowance and not (self.is_form or self.dropped or self.connection.worker.memory.is_available(length, self.owner)):
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
            self.connection.deferred, self._waiter = self._waiter.set, None

    def _may_have(self, size: int) -> bool:
        """Return whether the body may grow to this size. If not, it is dropped."""
        if size > self.limit:
            self._drop()
        elif self._streams_on and not self._ahead:
            self.allowance = self.limit
        elif not self._reserve_for(size):
            self.refuse(_no_memory())
        return not self.dropped

    def _reserve_for(self, size: int) -> bool:
        """Reserve memory for ``size`` bytes that have arrived and some more, because a reservation for each read would cost more."""
        wanted = min(size + max(FREE, size // _MORE), self.head.content_length or self.limit)
        owner = self._reserved_for if self._reserved else self.owner
        if not self.connection.worker.memory.reserve(wanted - self._reserved, owner, more=self._reserved > 0):
            return False
        self._reserved_for, self._reserved = owner, wanted
        self.allowance = wanted
        return True


def _no_memory() -> Refusal:
    return Refusal("overloaded", "The gateway holds too many large requests at the moment.")
