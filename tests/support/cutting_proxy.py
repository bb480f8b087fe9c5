"""A TCP proxy before a server, which disturbs streams at chosen bytes.

The rule: a stream is disturbed after a number of events and bytes, not after a time, so a test is the same on every machine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_STREAM = b"content-type: text/event-stream"
_EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a stream is disturbed: so many bytes after so many events. ``then`` is called there, with the port of the server.

    Afterwards nothing is forwarded any more. ``closes``: the connection is closed; with ``resets`` by a reset.
    """

    events: int
    extra: int = 0
    then: Callable[[int], object] | None = None
    closes: bool = True
    resets: bool = False


@dataclass
class CuttingProxy:
    """The running proxy. ``cuts``: one for each of the next streams, None for a stream that is not disturbed. Proxies may share them."""

    target: int
    cuts: deque[Cut | None]
    port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            server_reader, server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        one = _Forwarded(self, writer)
        upward = asyncio.create_task(_copy(reader, server, one.begin))
        upward.add_done_callback(lambda _: server.transport.abort())  # the gateway has closed the connection
        try:
            while data := await server_reader.read(1 << 16):
                if not await one.forward(data):
                    await asyncio.wait((upward,))  # the gateway closes the connection of a server that hangs
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass  # the proxy is closed, and awaits this task
        finally:
            upward.cancel()
            server.transport.abort()
            writer.close()

    async def close(self) -> None:
        """End all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Forwarded:
    """The responses of one connection."""

    def __init__(self, proxy: CuttingProxy, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._writer = writer
        self._cut: Cut | None = None
        self._is_first = True
        self._events = 0

    def begin(self) -> None:
        """Expect the next response: bytes of a request were forwarded."""
        self._is_first = True

    async def forward(self, data: bytes) -> bool:
        """Forward bytes of a response. Returns False after a cut that leaves the connection open. Raises ConnectionError after others."""
        if self._is_first:
            self._is_first, self._events, self._cut = False, 0, None
            if _STREAM in data and self._proxy.cuts:
                self._cut = self._proxy.cuts.popleft()
        cut = self._cut
        end = None if cut is None else self._end(data, cut)
        self._writer.write(data if end is None else data[:end])
        await self._writer.drain()
        if cut is None or end is None:
            return True
        if cut.then is not None:
            cut.then(self._proxy.target)
        if not cut.closes:
            return False
        if cut.resets:
            self._writer.transport.abort()
        raise ConnectionAbortedError

    def _end(self, data: bytes, cut: Cut) -> int | None:
        """Return how many of the bytes come before the cut; None for all. The bytes after its last event must be in the same read."""
        at = 0
        while self._events < cut.events:
            found = data.find(_EVENT_END, at)
            if found < 0:
                return None
            self._events, at = self._events + 1, found + len(_EVENT_END)
        return min(at + cut.extra, len(data))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[], None]) -> None:
    while data := await reader.read(1 << 16):
        note()
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def cutting_proxy(target: int, cuts: deque[Cut | None]) -> AsyncIterator[CuttingProxy]:
    """Run a proxy to a local port for the block."""
    proxy = CuttingProxy(target, cuts)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
