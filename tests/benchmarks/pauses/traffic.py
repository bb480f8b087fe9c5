"""The mixed load: every kind of client that a gateway has at the same time, each at its own rate, so that no proxy is loaded more.

The rule: clients send on a schedule and not after a response, and a client that fails is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import cast

import httptools
import httpx2

from tests.benchmarks.stage import Scale
from tests.benchmarks.streams import crowd
from tests.benchmarks.wire import chat, request

JSON, FAST, SLOW = "json", "fast", "slow"
"""The models of the load: one for each kind of server."""
FAST_RATE, SLOW_RATE = 50, 1
"""Events a second of a stream."""
_FAST_STREAMS, _SLOW_STREAMS = 300, 3000
_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class Requests:
    """So many clients that send requests with a body of each of these sizes in turn, together so many a second."""

    clients: int
    rate: float
    sizes: Sequence[int]


_SMALL = Requests(32, 400, (300,))
_LARGE = Requests(8, 40, (4_000, 32_000, 100_000, 256_000))
_BRIEF = 40  # connections a second that open, have one response or the beginning of a stream, and close
_SCRAPES = 1  # seconds between two


class Connection(asyncio.Protocol):
    """A client's connection, with one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._response: asyncio.Future[int] | None = None
        self._whole = True

    async def send(self, data: bytes, *, whole: bool = True) -> int:
        """Send a request and return the status of its response, once that is here, or once its first byte is. Raises ConnectionError."""
        self._response, self._whole = asyncio.get_running_loop().create_future(), whole
        self.transport.write(data)
        return await self._response

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def connection_lost(self, _: Exception | None) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, _: bytes) -> None:
        if not self._whole:
            self._finish()

    def on_message_complete(self) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_result(self._parser.get_status_code())


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection to a port of this machine, closed at the end."""
    _, made = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    try:
        yield made
    finally:
        made.transport.abort()


class Traffic:
    """The load on a port of this machine. `done` counts responses; `faults` what went wrong, as text."""

    def __init__(self, port: int, scale: Scale, metrics: str | None) -> None:
        self.done = 0
        self.faults: Counter[str] = Counter()
        self._port = port
        self._scale = scale
        self._metrics = metrics

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[None]:
        """Open all streams, each of which has had an event, and close them at the end. Raises TimeoutError if they do not open."""
        async with crowd(self._port, chat(FAST, stream=True)) as fast, crowd(self._port, chat(SLOW, stream=True)) as slow:
            for streams, count in ((fast, _FAST_STREAMS), (slow, _SLOW_STREAMS)):
                await streams.grow(self._scale.streams(count))
            yield
            self.faults.update((*fast.faults(), *slow.faults()))

    async def load(self, seconds: float) -> None:
        """Load beside the streams."""
        deadline = monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for requests in (_SMALL, _LARGE):
                bodies = [request(chat(JSON, size)) for size in requests.sizes]
                for number in range(requests.clients):
                    schedule = _Schedule(deadline, requests.clients / requests.rate, number / requests.rate)
                    group.create_task(self._send_all(schedule, bodies))
            async for number in _Schedule(deadline, 1 / _BRIEF):
                group.create_task(self._visit(stream=number % 2 == 1))
                if self._metrics is not None and number % (_SCRAPES * _BRIEF) == 0:
                    group.create_task(self._scrape(self._metrics))

    async def _send_all(self, schedule: _Schedule, bodies: Sequence[bytes]) -> None:
        async with connected(self._port) as connection:
            async for number in schedule:
                await self._counted(connection.send(bodies[number % len(bodies)]))

    async def _visit(self, *, stream: bool) -> None:
        async with connected(self._port) as connection:
            body = chat(FAST, stream=True) if stream else chat(JSON)
            await self._counted(connection.send(request(body), whole=not stream))

    async def _counted(self, response: Coroutine[None, None, int]) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                status = await response
        except (TimeoutError, ConnectionError) as error:
            self.faults[f"no response: {error!r}"] += 1
        else:
            self.done += 1
            if status != 200:
                self.faults[f"status {status}"] += 1

    async def _scrape(self, url: str) -> None:
        async with httpx2.AsyncClient(verify=False) as client:
            await client.get(url, timeout=_TIMEOUT)


class _Schedule:
    """Yields 0, 1, 2, … until a time of the monotonic clock, one each `period` seconds; those that are late follow at once."""

    def __init__(self, deadline: float, period: float, first: float = 0.0) -> None:
        self._deadline = deadline
        self._period = period
        self._due = monotonic() + first
        self._number = -1

    def __aiter__(self) -> _Schedule:
        return self

    async def __anext__(self) -> int:
        self._number += 1
        due = self._due + self._number * self._period
        if due >= self._deadline:
            raise StopAsyncIteration
        await asyncio.sleep(max(0.0, due - monotonic()))
        return self._number
