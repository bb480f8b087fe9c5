"""Two proxies of the tests. ``cutting`` forwards bytes and cuts them into other pieces; ``sharing`` sends requests of many clients on
few connections.

A network may cut bytes anywhere, and so may a proxy with small buffers. ``cutting`` is between a real proxy and the gateway, ``sharing``
is in place of the real proxy, and forwards headers unchanged. The rule: after each piece that is not the last of a
read, the gateway gets the time to read it alone.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

_READ = 1 << 18
_LINE = re.compile(rb"(?<=\S: )POST ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_PAUSE = 0.001
"""Seconds: the gateway reads meanwhile, unless it is busy."""
_CUTS = 0.1
"""The share of reads that are cut at a random byte."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write some bytes. Raises ConnectionError if the connection is closed, for which uvloop raises RuntimeError."""
    if writer.is_closing():
        raise ConnectionResetError
    writer.write(data)


async def _write(writer: asyncio.StreamWriter, data: bytes, dice: random.Random) -> None:
    """Write some bytes, perhaps in two pieces: a request line in a header's value begins a piece, other cuts are at random bytes."""
    line = _LINE.search(data)
    anywhere = dice.randrange(len(data)) if dice.random() < _CUTS else 0
    at = line.start() if line else anywhere
    if at:
        send(writer, data[:at])
        await asyncio.sleep(_PAUSE)
    send(writer, data[at:])
    await writer.drain()


@asynccontextmanager
async def _listening(serve: Serve) -> AsyncIterator[int]:
    """Serve on a loopback port, which is yielded. At the end all connections are closed."""
    tasks: set[asyncio.Task[None]] = set()

    async def tracked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(tracked, "127.0.0.1", 0, limit=_READ)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def cutting(to: int, dice: random.Random) -> AsyncIterator[int]:
    """Forward connections to a port. Yield the port of this proxy."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", to)

        async def respond() -> None:
            with suppress(ConnectionError):
                while data := await up_reader.read(_READ):
                    send(writer, data)
                    await writer.drain()
            writer.transport.abort()

        responses = asyncio.create_task(respond())
        try:
            while data := await reader.read(_READ):
                await _write(up_writer, data, dice)
        finally:
            up_writer.transport.abort()
            responses.cancel()
            await asyncio.gather(responses, return_exceptions=True)

    async with _listening(serve) as port:
        yield port


@asynccontextmanager
async def sharing(to: int, dice: random.Random, connections: int = 4) -> AsyncIterator[int]:
    """Send valid requests with a length to a port, on so few connections. Yield the port of this proxy. It closes on other requests."""
    idle: asyncio.LifoQueue[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None] = asyncio.LifoQueue()
    for _ in range(connections):
        idle.put_nowait(None)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            headers = await reader.readuntil(b"\r\n\r\n")
            lengths = _LENGTH.findall(headers)
            if (
                len(lengths) != 1
                or b"transfer-encoding" in headers.lower()
                or b"\nexpect" in headers.lower()
                or not headers.startswith(b"POST ")
            ):
                return
            body = await reader.readexactly(int(lengths[0]))
            upstream, pooled = await idle.get(), None
            try:
                up_reader, up_writer = upstream or await asyncio.open_connection("127.0.0.1", to, limit=_READ)
                try:
                    await _write(up_writer, headers + body, dice)
                    response, pooled_after = await _response(up_reader)
                    if pooled_after:
                        pooled = up_reader, up_writer
                finally:
                    if pooled is None:
                        up_writer.transport.abort()
            finally:
                idle.put_nowait(pooled)
            send(writer, response)
            await writer.drain()

    async with _listening(serve) as port:
        try:
            yield port
        finally:
            while not idle.empty():
                if (left := idle.get_nowait()) is not None:
                    left[1].transport.abort()


async def _response(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Read one response. Returns it, and whether the connection can be used again."""
    headers = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(headers)
    body = await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
    return headers + body, b"connection: close" not in headers.lower()
