"""The stand-in upstream of streams: `python -m tests.benchmarks.origin PORT RATE COUNT`, a raw protocol on uvloop.

Each request gets a stream of `COUNT` events of 200 bytes (0: for ever) at `RATE` events a second (0: as fast as they are read), each in
one chunk, then usage if it was requested, and `[DONE]`. Events have the running usage if that was requested. Streams of one rate are
spread evenly over the time between two events.
The rule: nothing is done for an event but its write.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable
from typing import cast

import httptools
import uvloop

from tests.benchmarks.wire import DONE, MODEL, USAGE, completion, counted_event, event, models

_HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON_HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_TICK = 0.001
_BURST = 32
_GOLDEN = (5**0.5 - 1) / 2
_RESPONSES = {b"/v1/models": models([MODEL]), b"/v1/chat/completions": completion()}


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Clock:
    """Ticks every millisecond; a stream has its turn once in `slots` ticks."""

    def __init__(self, rate: float) -> None:
        self.slots = max(1, round(1 / rate / _TICK)) if rate else 0
        self._due: list[set[Stream]] = [set() for _ in range(self.slots)]
        self._added = 0

    def add(self, stream: Stream) -> None:
        """Assign a slot to a stream. Multiples of the golden ratio spread any number of streams evenly."""
        self._added += 1
        stream.slot = int(self._added * _GOLDEN % 1 * self.slots)
        self._due[stream.slot].add(stream)

    def remove(self, stream: Stream) -> None:
        self._due[stream.slot].discard(stream)

    async def run(self) -> None:
        """Write one event to each stream at its tick. Streams of missed ticks are served too."""
        start, done = time.monotonic(), 0
        while True:
            now = int((time.monotonic() - start) / _TICK)
            for tick in range(done, now):
                for stream in tuple(self._due[tick % self.slots]):
                    stream.write_one()
            done = now
            await asyncio.sleep(_TICK)


class Stream(asyncio.Protocol):
    """A connection of the proxy, and the stream that it carries."""

    transport: asyncio.Transport
    slot: int = 0

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._count = count
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._sent = 0
        self._counts = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._remove()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if not self._clock.slots:
            self._burst()

    # llhttp's callbacks

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body.replace(b" ", b""), b""
        if b'"stream":true' in body:
            self._counts = b'"continuous_usage_stats":true' in body
            self._begin(requests_usage=b'"include_usage":true' in body)
        else:
            response = _RESPONSES.get(self._url, b"{}")
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(response), response)
            )

    # The stream

    def _begin(self, requests_usage: bool) -> None:
        self._sent = 0
        self._end = (chunk(USAGE) if requests_usage else b"") + chunk(DONE) + b"0\r\n\r\n"
        self.transport.write(_HEADERS)
        self.write_one()
        if self._clock.slots:
            self._clock.add(self)
        else:
            self._burst()

    def write_one(self) -> None:
        """The next event, or the end."""
        self._sent += 1
        now = time.monotonic_ns()
        self.transport.write(chunk(counted_event(now, self._sent) if self._counts else event(now)))
        if self._sent == self._count:
            self.transport.write(self._end)
            self._remove()

    def _burst(self) -> None:
        for _ in range(_BURST):
            if self._paused or self.transport.is_closing() or not self._unfinished():
                return
            self.write_one()
        asyncio.get_running_loop().call_soon(self._burst)

    def _unfinished(self) -> bool:
        return not self._count or self._sent < self._count

    def _remove(self) -> None:
        if self._clock.slots:
            self._clock.remove(self)


async def serve(port: int, rate: float, count: int) -> None:
    """Serve until the process is ended."""
    clock = Clock(rate)
    make: Callable[[], Stream] = lambda: Stream(clock, count)  # noqa: E731  # a factory with its type
    await asyncio.get_running_loop().create_server(make, "127.0.0.1", port, backlog=8192)
    gc.collect()
    gc.freeze()
    gc.disable()
    await (clock.run() if clock.slots else asyncio.Event().wait())


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
