"""Requests that reach a server at the moment at which it closes their idle connection."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson
import pytest

from tests.faults.conftest import FULL
from tests.faults.invariants import unharmed
from tests.support.running import model
from tests.support.wire import Client, chat, client, request

POSTS = 100_000 if FULL else 3_000
CLIENTS = 24
IDLE = 0.02
"""Seconds, on average, after which the server closes an idle connection, and for which clients wait between two requests."""


class Closing(asyncio.Protocol):
    """A connection of the server. It closes after a random idle time. In some cases it closes as a request arrives, without reading it."""

    def __init__(self, ran: Counter[int], closed: Counter[str], dice: random.Random) -> None:
        self._ran, self._closed, self._dice = ran, closed, dice
        self._held = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if self._dice.random() < 0.1:  # its idle timeout expired a moment before
                self._close("as a request came")
                return
        self._held += data
        head, end, body = self._held.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            return
        self._held = b""
        self._ran[orjson.loads(body)["seed"]] += 1
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        self._timer = asyncio.get_running_loop().call_later(self._dice.uniform(0, 2 * IDLE), self._close, "idle")

    def _close(self, why: str) -> None:
        self._closed[why] += 1
        self._transport.abort()  # sends RST if a request is on its way

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextmanager
def closing_server(ran: Counter[int], closed: Counter[str]) -> Iterator[int]:
    """Run the server in a separate thread, so that it closes connections while the gateway sends requests."""
    dice, ports, done = random.Random(6), asyncio.Queue[int](), threading.Event()
    started = threading.Event()

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Closing(ran, closed, dice), "127.0.0.1", 0)
        ports.put_nowait(server.sockets[0].getsockname()[1])
        started.set()
        async with server:
            while not done.is_set():  # noqa: ASYNC110  told from another thread
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(60)
        yield ports.get_nowait()
    finally:
        done.set()
        thread.join()


@pytest.mark.row(6)
@pytest.mark.timeout(1200)
async def test_every_request_succeeds_and_runs_once(measured: Callable[[str], None]) -> None:
    ran, closed, numbers, dice = Counter[int](), Counter[str](), iter(range(POSTS)), random.Random(66)
    statuses = Counter[int]()

    async def one_client(one: Client) -> None:
        for number in numbers:
            statuses[(await one.request(request(chat(seed=number)))).status] += 1
            await asyncio.sleep(dice.uniform(0, 2 * IDLE))

    with closing_server(ran, closed) as port:
        async with unharmed([model(port)]) as served:

            async def work() -> None:
                async with client(served.port) as one:
                    await one_client(one)

            await asyncio.gather(*(work() for _ in range(CLIENTS)))
            retried = served.value("retries_total", "tiny")
    assert statuses == {200: POSTS}
    assert len(ran) == POSTS and set(ran.values()) == {1}, "a request was lost, or ran twice"
    assert retried >= 0.8 * closed["as a request came"] > 0, "the race was not run"
    measured(f"{POSTS:,} POSTs, {closed.total():,} connections closed by the server, {retried:,.0f} sent again: 0 errors, 0 run twice")
