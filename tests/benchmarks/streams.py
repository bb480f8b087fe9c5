"""A crowd of clients that read streams: raw protocols that count events and look at some of their stamps.

The rule: a client does nothing for an event but count it, so that the crowd is not what is measured; `accounting.Cost.own` tells what it
took itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import cast

import httptools

from tests.benchmarks.wire import request, stamp_in

_OPENED_AT_ONCE = 100
_END_OF_EVENT = b"\n\n"


class Client(asyncio.Protocol):
    """One stream. `sampled`: whether the stamps of its events are looked at."""

    transport: asyncio.Transport

    def __init__(self, crowd: Crowd, sampled: bool) -> None:
        self._crowd = crowd
        self._sampled = sampled
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        self._events = 0
        loop = asyncio.get_running_loop()
        self.began: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it
        self.transport.write(self._crowd.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self._crowd.lost += 1
            self._finish()

    # llhttp's callbacks

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._crowd.refused[self._parser.get_status_code()] += 1
            self._finish()

    def on_body(self, body: bytes) -> None:
        count = body.count(_END_OF_EVENT) + (self._tail == b"\n" and body.startswith(b"\n"))
        self._tail = body[-1:] if not body.endswith(_END_OF_EVENT) else b""
        self._events += count
        self._crowd.events += count
        if self._events and not self.began.done():
            self.began.set_result(None)
        if self._sampled and (made := stamp_in(body)) is not None:
            self._crowd.delays.append(monotonic_ns() - made)

    def on_message_complete(self) -> None:
        self._crowd.ended += 1
        self._finish()

    def _finish(self) -> None:
        for future in (self.began, self.ended):
            if not future.done():
                future.set_result(None)

    def disconnect(self) -> None:
        """Close the connection; what happens then is no fault."""
        self._finish()
        self.transport.abort()


@dataclass
class Crowd:
    """Clients of one proxy, and what they have seen together. `delays` are nanoseconds from an event's making to its arrival."""

    port: int
    request: bytes
    clients: list[Client] = field(default_factory=list)
    events: int = 0
    delays: list[int] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    ended: int = 0

    async def grow(self, count: int, *, sampled_of: int = 10, seconds: float = 60.0) -> None:
        """Open streams until there are so many and each has had an event. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            while len(self.clients) < count:
                batch = range(len(self.clients), min(count, len(self.clients) + _OPENED_AT_ONCE))
                made = [Client(self, number % sampled_of == 0) for number in batch]
                await asyncio.gather(*(loop.create_connection(lambda each=each: each, "127.0.0.1", self.port) for each in made))  # type: ignore[misc]
                self.clients += made
                await asyncio.gather(*(each.began for each in made))

    async def first_event(self, seconds: float = 20.0) -> int:
        """Open one stream, read its first event, leave; nanoseconds from connecting. Raises TimeoutError."""
        began = monotonic_ns()
        client = Client(self, sampled=False)
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", self.port)
            await client.began
        took = monotonic_ns() - began
        client.disconnect()
        return took

    @property
    def opened(self) -> int:
        """How many have had an event, or have ended."""
        return sum(client.began.done() for client in self.clients)

    def faults(self) -> Iterator[str]:
        """The failures so far, as text."""
        for status, count in self.refused.items():
            yield f"{count} streams refused with status {status}"
        if self.lost:
            yield f"{self.lost} streams broke off"

    @contextmanager
    def window(self) -> Iterator[Crowd]:
        """Count from 0 within the block."""
        self.events = 0
        self.delays.clear()
        yield self


@asynccontextmanager
async def crowd(port: int, body: bytes, path: str = "/v1/chat/completions") -> AsyncIterator[Crowd]:
    """An empty crowd; clients that are still connected at the end disconnect."""
    made = Crowd(port, request(body, path))
    try:
        yield made
    finally:
        for client in made.clients:
            client.disconnect()
        await asyncio.sleep(0)


def percentile(values: list[int], share: float) -> float | None:
    """The value that `share` (0 to 1) of the values do not exceed; None without any."""
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else None
