"""One connection to the store, and how it is opened: to a socket, to the first of several hosts, or to the primary that Sentinels know.

The rule: the store is used on a connection after the last command of the greeting, a write, has succeeded. So a replica is skipped. The
reply of a Sentinel is a candidate, because a Sentinel notices a failover late. Only a write shows that it is the primary.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeAlias, cast

from hiredis import HiredisError, ProtocolError, Reader, ReplyError, pack_command

from gateway.snapshot.snapshot import LimitsStore
from upstream.http.inline_task import Signal
from upstream.http.write_batching import LeadingTransport, WriteBatch

_READING = 0.001  # seconds in which the event loop reads what has arrived
_ATTEMPT = 1.0  # seconds of an attempt to connect to one host, which takes several round trips; more if a reply may take longer
_BYTES = 4096  # of a read from a Sentinel; its replies are short
_INCOMPLETE = object()  # what the reader returns instead of a reply that has not arrived completely

Reply: TypeAlias = int | bytes | list["Reply"] | ReplyError | None
"""A reply of the store. The text of an error starts with a code such as NOSCRIPT."""


def packed_command(*parts: str | int) -> bytes:
    """Return the bytes of a command."""
    packed: bytes = pack_command(cast(Any, parts))  # hiredis declares tuples of one part
    return packed


def authentication(settings: LimitsStore) -> list[bytes]:
    """Return the command that authenticates a connection, if there is a password."""
    if settings.password is None:
        return []
    return [packed_command("AUTH", *([settings.user] if settings.user else []), settings.password)]


class ReplyLostError(ReplyError):
    """The connection was closed before the reply came. The command has run, will run, or never runs."""


class PendingCommand:
    """A command that waits for its reply. ``with_script`` makes the bytes for a store that has lost the script."""

    __slots__ = ("on_reply", "reply", "sent", "signal", "with_script")

    def __init__(self, again: Callable[[], bytes] | None) -> None:
        self.signal = Signal()
        self.reply: Reply = None
        self.with_script = again
        self.on_reply: Callable[[Reply], None] | None = None
        self.sent = monotonic()

    def resolve(self, reply: Reply) -> None:
        """Set the reply and resume the waiting request."""
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)
        self.signal.set()


class StoreConnection(asyncio.Protocol):
    """One connection to the store. Replies are matched to commands in order.

    The requests of a busy event-loop iteration share one write, and so one round trip. It precedes the writes to clients, because a
    settlement must be on its way before the client gets the end of its response.
    """

    transport: LeadingTransport

    def __init__(self, timeout: float, on_lost: Callable[[StoreConnection, str], None], write_batch: WriteBatch) -> None:
        self._write_batch = write_batch
        self._timeout = timeout
        self._on_lost = on_lost
        self._reader = Reader(notEnoughData=_INCOMPLETE)
        self._pending: deque[PendingCommand] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = LeadingTransport(cast(asyncio.Transport, transport), self._write_batch)

    def send(self, data: bytes, again: Callable[[], bytes] | None = None) -> PendingCommand:
        """Send a command and return it as pending."""
        pending = PendingCommand(again)
        self._pending.append(pending)
        self.transport.write(data)
        return pending

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _INCOMPLETE:
                self._receive(reply)
        except (ProtocolError, IndexError) as error:
            self.fail(f"it sent an invalid reply: {error}")

    def _receive(self, reply: Reply) -> None:
        pending = self._pending.popleft()
        if isinstance(reply, ReplyError) and pending.with_script is not None and str(reply).startswith("NOSCRIPT"):
            self._pending.append(pending)
            self.transport.write(pending.with_script())
            pending.with_script = None
            return
        pending.resolve(reply)
        if isinstance(reply, ReplyError):
            self.fail(str(reply))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(f"it closed the connection{f': {error}' if error else ''}")

    def check(self, now: float) -> None:
        """Close the connection if a reply is overdue, unless it has arrived and was not read yet."""
        if self._pending and now - self._pending[0].sent > self._timeout:
            asyncio.get_running_loop().call_later(_READING, self._give_up, self._pending[0])

    def _give_up(self, oldest: PendingCommand) -> None:
        if self._pending and self._pending[0] is oldest:
            self.fail("it does not respond")

    def fail(self, reason: str) -> None:
        """Close the connection and resolve all pending commands with ReplyLostError."""
        self.transport.mark_closed()
        self.transport.abort()
        lost, self._pending = self._pending, deque()
        self._on_lost(self, reason)
        for pending in lost:
            pending.resolve(ReplyLostError(reason))


async def connect(
    settings: LimitsStore, new_connection: Callable[[], StoreConnection], greeting: Sequence[bytes]
) -> tuple[StoreConnection, PendingCommand]:
    """Connect to the socket, or to the first host that accepts the greeting. Return the connection and the greeting's last command.

    Raises OSError.
    """
    failures: list[str] = []
    for address in (settings.path,) if settings.path is not None else settings.hosts:
        try:
            async with asyncio.timeout(max(_ATTEMPT, settings.timeout)):
                line = await _opened(settings, address, new_connection)
                return line, await _greeted(line, greeting)
        except TimeoutError:
            failures.append("it does not respond")
        except (OSError, ReplyError) as error:
            failures.append(str(error))
    if len(failures) > 1:
        failures = [f"{host}:{port}: {failure}" for (host, port), failure in zip(settings.hosts, failures, strict=True)]
    raise ConnectionError(", ".join(failures))


async def _opened(settings: LimitsStore, address: str | tuple[str, int], new_connection: Callable[[], StoreConnection]) -> StoreConnection:
    """Open a connection to a socket, to a host, or to the primary that the Sentinel at a host knows. Raises OSError and ReplyError."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        _, line = await loop.create_unix_connection(new_connection, address)
        return line
    context = ssl.create_default_context() if settings.tls else None
    if settings.primary is not None:
        address = await _primary_address(settings, address, context)
    _, line = await loop.create_connection(new_connection, *address, ssl=context)
    return line


async def _primary_address(settings: LimitsStore, sentinel: tuple[str, int], context: ssl.SSLContext | None) -> tuple[str, int]:
    """Return the host and port of the primary. Raises OSError and ReplyError."""
    # A Sentinel with a password usually has the store's password. One without a password replies with an error to AUTH, and serves.
    commands = [*authentication(settings), packed_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", settings.primary or "")]
    stream, writer = await asyncio.open_connection(*sentinel, ssl=context)
    try:
        writer.write(b"".join(commands))
        *_, reply = await _replies(stream, len(commands))
    finally:
        writer.transport.abort()
    match reply:
        case ReplyError():
            raise reply
        case [bytes(host), bytes(port)] if port.isdigit():
            return host.decode(), int(port)
    raise ConnectionError(f"the Sentinel knows no primary {settings.primary}")


async def _replies(stream: asyncio.StreamReader, count: int) -> list[object]:
    """Read replies. Raises OSError."""
    reader, found = Reader(notEnoughData=_INCOMPLETE), list[object]()
    try:
        while len(found) < count:
            if (reply := reader.gets()) is not _INCOMPLETE:
                found.append(reply)
            elif data := await stream.read(_BYTES):
                reader.feed(data)
            else:
                raise ConnectionError("the Sentinel closed the connection")
    except HiredisError as error:
        raise ConnectionError(f"the Sentinel sent an invalid reply: {error}") from None
    return found


async def _greeted(line: StoreConnection, greeting: Sequence[bytes]) -> PendingCommand:
    """Send the commands of the greeting and return the last one. Raises ReplyError."""
    try:
        for pending in [line.send(each) for each in greeting]:
            await pending.signal
            if isinstance(pending.reply, ReplyError):
                raise pending.reply
    except BaseException:
        line.transport.abort()
        raise
    return pending
