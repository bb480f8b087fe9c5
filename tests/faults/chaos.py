"""A network that misbehaves: a proxy between a client and a server, whose every fault a test decides.

The rule: what happens to a connection is fixed by its ``Weather`` when it is accepted, counted in bytes and not in
time wherever that is possible, so that a fault comes at the same place in every run.
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
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time: closing sends RST


class End(Enum):
    """How a connection is cut."""

    CLOSE = auto()
    """FIN both ways, as from a process that ends."""
    RESET = auto()
    """RST both ways, as from a machine that has forgotten the connection."""
    HALF_CLOSE = auto()
    """FIN to the client alone: the way to the server stays open."""
    BLACK_HOLE = auto()
    """Nothing more passes in either direction, and nobody is told."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to one connection. Bytes are counted in the server's answer, from the first of the connection.

    ``delay`` in seconds before each piece of the answer; ``rate`` in its bytes per second; after ``cut_at`` bytes it ends
    as ``end`` says; the byte at ``garble_at`` has its bits turned over; ``pieces``: the most bytes that are passed on at once.
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
    """The running proxy. ``weather`` gives that of connection ``n``, counted from 0."""

    port: int
    weather: Callable[[int], Weather]
    accepted: int = 0
    open: int = 0
    passed: int = 0
    """Bytes of answers that went through."""


@asynccontextmanager
async def chaos(to: int, weather: Weather | Callable[[int], Weather] = CLEAR) -> AsyncIterator[Chaos]:
    """Stand before a server on a loopback port."""
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
    upwards = asyncio.create_task(_pass(reader, up_writer))
    try:
        ended = await _answer(up_reader, writer, weather, state)
        if ended is End.BLACK_HOLE:
            upwards.cancel()
            await asyncio.gather(upwards, return_exceptions=True)
            while await reader.read(_READ):  # dropped, until the client has had enough
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


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The request, as it is; the client's end is the server's."""
    try:
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()
        writer.close()
    except asyncio.CancelledError:
        return  # the fault goes on without it


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, weather: Weather, state: Chaos) -> End:
    """The answer, with what happens to it; returns how it ended."""
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
