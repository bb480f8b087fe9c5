"""One inference request as the story sees it: its head, its body as it comes, and the way back to its client.

The rules: an answer begins once and ends once, and whatever cannot be answered any more is closed; when the client
leaves, in whatever state, the task that serves it is cancelled at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec
from msgspec import field
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.catalog import Target
from gateway.errors import Refusal
from gateway.memory import FREE
from gateway.tracing import Trace
from upstream.story import Signal, Story

if TYPE_CHECKING:
    from gateway.edge import EdgeProtocol
    from gateway.limits import Permit

_UPLOAD_AHEAD = 256 * 1024  # bytes of a streamed body that may wait for the server, or of an answer that is not copied
_PIECE = 64 * 1024  # bytes of a streamed body that are processed in one event-loop iteration


def request_ids() -> Iterator[str]:
    """``req_`` and 24 hexadecimal digits each, without end; many are made at once.

    They begin with the second in which they were made, as UUIDs of version 7 do, so that a database's index grows at its end; 64 bits
    are random.
    """
    while True:
        second, digits = f"req_{int(time()):08x}", os.urandom(8 * 256).hex()
        for start in range(0, len(digits), 16):
            yield second + digits[start : start + 16]


class _Unheard:
    """What uvicorn sets to wake an ASGI application; a Call has none."""

    def set(self) -> None:
        """Nothing waits here."""


_UNHEARD = _Unheard()


class Call(msgspec.Struct, eq=False):
    """One inference request and the way back to its client.

    It stands where uvicorn has its RequestResponseCycle and keeps the attributes that uvicorn's protocol reads
    there (``response_complete``, ``keep_alive``, ``disconnected``, ``message_event``).
    """

    edge: EdgeProtocol
    target: Target
    headers: dict[bytes, bytes]
    id: str
    limit: int
    """Bytes that the body may have."""
    allowance: int
    """Bytes that it may have without being looked at."""
    over: bool
    """Nothing more of the body is kept: it is larger than its limit, or was refused."""
    http10: bool
    keep_alive: bool
    began: float = field(default_factory=monotonic)
    trace: Trace | None = None
    """Where the request stands in its trace; None where nothing is traced."""
    holder: str = ""
    """For whom memory is taken for its body: its key, once that is known."""
    # The body
    _buffer: bytes | bytearray = b""
    _halfway: bool = False
    _ahead: bool = False
    _waiter: Signal | None = None
    _asked: bool = False
    _passes_on: bool = False
    _charged: int = 0
    _charged_to: str = ""
    _spoilt: Refusal | None = None
    bytes_in: int = 0
    more_body: bool = True
    # The answer
    _chunked: bool = False
    started: bool = False
    events: bool = False
    response_complete: bool = False
    status: int = 0
    bytes_out: int = 0
    on_pause: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None
    told: bytes = b""
    """More lines for the head of the answer, each with its CRLF."""
    # The connection
    disconnected: bool = False
    message_event: _Unheard = _UNHEARD
    task: Story | None = None
    permit: Permit | None = None
    """Its share of its key's limits, where the key has any."""

    # Reading

    async def body(self) -> bytes | bytearray:
        """The whole body, once. Raises Refusal request_too_large beyond the limit, and overloaded where there is no memory for it."""
        if self.more_body:
            self._ask()
        while self.more_body and not self.over:
            await self._wait()
        return self.whole_body()

    def whole_body(self) -> bytes | bytearray:
        """As ``body``, where nothing more is to come."""
        if self.over:
            self._check()
        body, self._buffer = self._buffer, b""
        return body

    async def next_bytes(self) -> bytes:
        """The next ``_PIECE`` of the body or less, as it comes, ``b""`` at its end. Raises Refusal as ``body`` does.

        Between two pieces that are there already the event loop serves others.
        """
        self._ask()
        if self._halfway:
            await self.edge.door.steps.pause()
        while self.more_body and not self._buffer and not self.over:
            await self._wait()
        self._check()
        buffer = self._buffer
        self._halfway = len(buffer) > _PIECE
        if not self._halfway:
            self._buffer = b""
            self.edge.flow.resume_reading()
            return bytes(buffer)
        self._buffer = buffer = bytearray(buffer) if type(buffer) is bytes else buffer
        piece = bytes(buffer[:_PIECE])
        del buffer[:_PIECE]  # type: ignore[union-attr]
        return piece

    @property
    def all_read(self) -> bool:
        """The body is in, and all of it has been read."""
        return not (self.more_body or self._buffer)

    def pass_on(self) -> None:
        """What comes from now on goes to a server as it comes, and is not kept."""
        self._passes_on = True

    def read_ahead(self) -> None:
        """Read a body that is streamed on before anybody takes it, up to its limit: its client's leaving is to be seen meanwhile."""
        self._ahead = True
        self.allowance = min(self.allowance, max(self.bytes_in, FREE))
        if self.edge.flow.read_paused:
            self.edge.flow.resume_reading()

    @property
    def awaits_body(self) -> bool:
        """The client has been asked for the body, and it makes a difference whether it comes."""
        return self._asked and not self.started and not self.over

    def _ask(self) -> None:
        """From now on it is the client who is waited for; one that waits for a word gets it (RFC 9110, section 10.1.1)."""
        if self._asked:
            return
        self._asked = True
        if self._length > self.allowance and not self._streamed and not self.over and not self._make_room(self._length):
            self.refuse_body(_no_memory())
        elif not self.over and not self.http10 and self.headers.get(b"expect", b"").lower() == b"100-continue":
            self.edge.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def _length(self) -> int:
        """What the client says that the body has, 0 when it does not."""
        return int(self.headers.get(b"content-length", b"0"))

    @property
    def _streamed(self) -> bool:
        return self.target.route.takes_form

    def _check(self) -> None:
        if self._spoilt is not None:
            raise self._spoilt
        if self.over:
            raise Refusal("request_too_large", f"The body is larger than {self.limit} bytes.")

    async def _wait(self) -> None:
        self._waiter = Signal()
        await self._waiter

    def _wake(self) -> None:
        """What waits for the body goes on, but not inside the parser."""
        if self._waiter is not None:
            self.edge.due, self._waiter = self._waiter.tell, None

    def received(self, data: bytes) -> None:
        """The parser gave more of the body."""
        if self.response_complete or self.over:
            return  # nobody will read it
        size = self.bytes_in = self.bytes_in + len(data)
        if size > self.allowance and not self._may_have(size):
            return
        buffer = self._buffer
        if not buffer:
            self._buffer = data
        elif type(buffer) is bytearray:
            buffer += data
        else:
            self._buffer = bytearray(buffer) + data
        if self.target.route.takes_form:
            if len(self._buffer) > _UPLOAD_AHEAD and self.task is not None and not self._ahead:
                self.edge.flow.pause_reading()  # streamed on as fast as the server takes it
            self._wake()

    def _may_have(self, size: int) -> bool:
        """Whether the body may grow to this size. If not, nothing of it is kept, and whoever reads it is told."""
        if size > self.limit:
            self.over = True
            self._buffer = b""
            self._wake()
        elif self._passes_on and not self._ahead:
            self.allowance = self.limit
        elif not self._make_room(size):
            self.refuse_body(_no_memory())
        return not self.over

    def _make_room(self, size: int) -> bool:
        """Take memory for the body: for the whole, or step by step where nobody knows how much of it will be held."""
        whole = self._length or self.limit
        wanted = whole if self._length and not self._streamed else min(size + FREE, whole)
        holder = self._charged_to if self._charged else self.holder
        if not self.edge.door.memory.take(wanted - self._charged, holder, more=self._charged > 0):
            return False
        self._charged_to, self._charged = holder, wanted
        self.allowance = wanted
        return True

    def hold(self, size: int) -> None:
        """Count ``size`` bytes as held for the body from now on, where that is more than before. Raises Refusal overloaded."""
        if size <= self._charged or size <= FREE:
            return
        holder = self._charged_to if self._charged else self.holder
        if not self.edge.door.memory.take(size - self._charged, holder, more=self._charged > 0):
            raise _no_memory()
        self._charged_to, self._charged = holder, size

    def refuse_body(self, refusal: Refusal) -> None:
        """Nothing more of the body is kept: whoever reads it gets the refusal."""
        self._spoilt = refusal
        self.over = True
        self._buffer = b""
        self._wake()

    def spoil(self, refusal: Refusal) -> None:
        """The rest of the body is no HTTP, or does not come: whoever reads it gets the refusal."""
        self.refuse_body(refusal)
        self.keep_alive = False

    def received_all(self) -> None:
        """The body is in."""
        self.more_body = False
        if self.edge.flow.read_paused:
            self.edge.flow.resume_reading()
        self._wake()

    @property
    def under_way(self) -> int:
        """How many requests the worker is working on, this one among them."""
        return len(self.edge.tasks)

    # Writing

    @property
    def write_paused(self) -> bool:
        """The client has fallen behind what was written."""
        return self.edge.flow.write_paused

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole answer in one write. ``headers`` are lines that end with CRLF."""
        if self.disconnected:
            return
        size = self.bytes_out = len(body)
        head = self._head(status, headers, b"content-length: %d\r\n" % size)
        if size < _UPLOAD_AHEAD:
            self.edge.transport.write(head + body)
        else:
            self.edge.transport.writelines((head, body))
        self.response_complete = True
        self.edge.on_call_complete(self)

    def begin(self, status: int, headers: bytes, length: int | None, body: bytes = b"", *, events: bool = False) -> None:
        """The head, with the first bytes of the body; without a length the body is chunked.

        ``events`` says that the body is a stream of events, in which an error can still be told.
        """
        if self.disconnected:
            return
        self.events = events
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.http10:
            framing, self.keep_alive = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        self._put(self._head(status, headers, framing), body)

    def _head(self, status: int, headers: bytes, framing: bytes) -> bytes:
        self.started = True
        self.status = status
        if self.more_body and not self.response_complete:
            self.keep_alive = False  # the rest of the body is of no use: tell the client, read it off, close
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif self.http10:
            framing += b"connection: keep-alive\r\n"
        door = self.edge.door
        if b"origin" in self.headers:
            framing += door.cors_lines(self.headers[b"origin"])
        if self.told:
            framing += self.told
        if self.permit is not None:
            framing += self.permit.lines()
        identity = self.id.encode()
        if self.target.route.anthropic:
            framing += b"request-id: %b\r\n" % identity  # the name that Anthropic's clients read
        return b"%bx-request-id: %b\r\n%b%b%b\r\n" % (STATUS_LINE[status], identity, headers, framing, door.date_line)

    def write(self, data: bytes) -> None:
        """More of the body, at once."""
        if data and not self.disconnected:
            self._put(b"", data)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Writes chunks that are framed already, for an answer that has begun; None where it is not sent in chunks."""
        return self.edge.transport.write if self._chunked and not self.disconnected else None

    def _put(self, head: bytes, data: bytes) -> None:
        self.bytes_out += len(data)
        if self._chunked and data:
            self.edge.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self.edge.transport.write(head + data)

    def finish(self) -> None:
        """The answer is whole."""
        if self.disconnected or self.response_complete:
            return
        if self._chunked:
            self.edge.transport.write(b"0\r\n\r\n")
        self.response_complete = True
        self.edge.on_call_complete(self)

    def abort(self) -> None:
        """The answer can't be completed: cut the connection, so that nobody takes it for whole."""
        self.response_complete = True
        self.keep_alive = False
        self.edge.cut()

    def settled(self) -> None:
        """Its story is over."""
        if self._charged:
            self._give_back()
        self.edge.on_call_settled(self)

    def _give_back(self) -> None:
        self.edge.door.memory.give(self._charged, self._charged_to)
        self._charged = 0

    # What the edge tells

    def lost(self) -> None:
        """The client has left."""
        if not self.response_complete:
            self.disconnected = True
            if self.task is not None:
                self.task.cancel()
            elif self._charged:
                self._give_back()


def _no_memory() -> Refusal:
    return Refusal("overloaded", "The gateway holds too many large requests at the moment.")
