"""A server on a real socket. The test decides every byte that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson


@dataclass
class Request:
    """A request as the server received it."""

    head: bytes
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        document = orjson.loads(self.body)
        assert isinstance(document, dict)
        return document

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.decode().lower() == name:
                return value.strip().decode()
        return None


@dataclass
class Conversation:
    """One exchange, as the script sees it: ``write`` bytes, or ``close`` or ``abort`` the connection."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int

    @property
    def host(self) -> str:
        """The local address of the connection."""
        return str(self.writer.get_extra_info("sockname")[0])

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed_by_peer(self) -> None:
        """Wait until the peer has closed the connection."""
        while await self.reader.read(65536):
            pass

    async def respond(self, body: bytes, status: str = "200 OK", kind: str = "application/json") -> None:
        await self.write(
            b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), kind.encode(), len(body), body)
        )

    async def trickle(self, body: bytes, piece: int = 7) -> None:
        """Send a JSON response in pieces. The gateway reads each piece separately."""
        await self.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), piece):
            await self.write(body[at : at + piece])
            await asyncio.sleep(0.002)

    async def begin_stream(self) -> None:
        await self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")


Script = Callable[[Conversation], Awaitable[None]]


@dataclass
class Scripted:
    """The running server: its received requests, and the number of its connections."""

    port: int
    requests: list[Request] = field(default_factory=list)
    open: int = 0
    accepted: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    """The writer of every connection so far."""

    def hang_up(self) -> None:
        """Close every connection, as a server closes idle connections."""
        for writer in self.writers:
            writer.close()


@asynccontextmanager
async def scripted(script: Script, *more: str) -> AsyncIterator[Scripted]:
    """Run the script for every request, on keep-alive connections. ``more``: other loopback addresses with the same port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.writers.append(writer)
        state.open += 1
        state.accepted += 1
        try:
            while not writer.is_closing():
                request = await read_request(reader)
                state.requests.append(request)
                await script(Conversation(request, reader, writer, len(state.requests)))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            state.open -= 1
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 22)
    state = Scripted(server.sockets[0].getsockname()[1])
    others = await asyncio.start_server(serve, more, state.port, limit=1 << 22) if more else None
    try:
        yield state
    finally:
        server.close()
        if others is not None:
            others.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in state.writers:
            writer.transport.abort()  # a connection with unread data would stay open
        await asyncio.sleep(0)
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Read one HTTP/1.1 request, chunked or with a length."""
    headers = await reader.readuntil(b"\r\n\r\n")
    request = Request(headers[:-4], b"")
    length = request.header("content-length")
    if length is not None:
        request.body = await reader.readexactly(int(length))
    elif request.header("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\n"), 16):
            request.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    return request
