"""A faulty network: a proxy between a client and a server. The test decides each of its faults.

The rule: the ``Weather`` of a connection is fixed when the connection is accepted. Faults are counted in bytes rather than in
time wherever possible, so that a fault occurs at the same byte in every run.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto

_READ = 65536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time: closing the socket sends RST


class End(Enum):
    """How a connection is cut."""

    CLOSE = auto()
    """FIN in both directions, as from a process that exits."""
    RESET = auto()
    """RST in both directions, as from a machine that has restarted."""
    HALF_CLOSE = auto()
    """FIN to the client only. The direction to the server stays open."""
    BLACK_HOLE = auto()
    """No more packets pass in either direction, and neither side is notified."""


@dataclass(frozen=True, slots=True)
class Weather:
    """The faults of one connection. Bytes of responses are counted from the start of the connection.

    ``delay``: seconds before each piece of the response. ``rate``: bytes per second. After ``cut_at`` bytes the connection is cut
    as ``end`` specifies. All bits of the byte at ``garble_at`` are inverted. ``pieces``: the most bytes that are forwarded at once.
    """

    delay: float = 0.0
    rate: float | None = None
    cut_at: int | None = None
    end: End = End.CLOSE
    garble_at: int | None = None
    pieces: int = _READ


CLEAR = Weather()


@dataclass
class Chaos:
    """The running proxy. ``weather`` returns the ``Weather`` of connection ``n``, counted from 0."""

    port: int
    weather: Callable[[int], Weather]
    accepted: int = 0
    open: int = 0
    passed: int = 0
    """Bytes of responses that were forwarded."""


@asynccontextmanager
async def chaos(to: int, weather: Weather | Callable[[int], Weather] = CLEAR) -> AsyncIterator[Chaos]:
    """Run the proxy in front of a server on a loopback port."""
    tasks: set[asyncio.Task[None]] = set()
    rule: Callable[[int], Weather] = weather if callable(weather) else lambda _: weather

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        number, state.accepted, state.open = state.accepted, state.accepted + 1, state.open + 1
        try:
            await _connect(reader, writer, to, state.weather(number), state)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            state.open -= 1
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state = Chaos(server.sockets[0].getsockname()[1], rule)
    try:
        yield state
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: int, weather: Weather, state: Chaos) -> None:
    up_reader, up_writer = await asyncio.open_connection("127.0.0.1", to)
    upwards = asyncio.create_task(_forward_request(reader, up_writer))
    try:
        ended = await _forward_response(up_reader, writer, weather, state)
        if ended is End.BLACK_HOLE:
            upwards.cancel()
            await asyncio.gather(upwards, return_exceptions=True)
            while await reader.read(_READ):  # dropped, until the client disconnects
                pass
        elif ended is End.RESET:
            for each in (writer, up_writer):
                _reset(each)
        elif ended is End.HALF_CLOSE:
            writer.write_eof()
            await upwards
    finally:
        upwards.cancel()
        await asyncio.gather(upwards, return_exceptions=True)
        up_writer.close()


async def _forward_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward the request unchanged. When the client closes, close the connection to the server."""
    try:
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()
        writer.close()
    except asyncio.CancelledError:
        return  # the fault continues without this task


async def _forward_response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, weather: Weather, state: Chaos) -> End:
    """Forward the response, apply the faults, and return how the connection ended."""
    passed = 0
    while data := await reader.read(weather.pieces):
        if weather.delay:
            await asyncio.sleep(weather.delay)
        data, cut = _cut(_garbled(data, passed, weather), passed, weather)
        writer.write(data)
        await writer.drain()
        passed += len(data)
        state.passed += len(data)
        if cut:
            return weather.end
        if weather.rate is not None:
            await asyncio.sleep(len(data) / weather.rate)
    return End.CLOSE


def _cut(data: bytes, passed: int, weather: Weather) -> tuple[bytes, bool]:
    if weather.cut_at is None or passed + len(data) < weather.cut_at:
        return data, False
    return data[: weather.cut_at - passed], True


def _garbled(data: bytes, passed: int, weather: Weather) -> bytes:
    at = -1 if weather.garble_at is None else weather.garble_at - passed
    if not 0 <= at < len(data):
        return data
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
