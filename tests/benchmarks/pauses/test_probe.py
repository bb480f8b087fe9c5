"""The probe of an event loop, in a loop that does real work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from time import thread_time
from typing import Any

import pytest
import uvloop

from tests.benchmarks.pauses.probe import Histogram, MeasuredLoop, Result

SLOW = 0.03
"""Seconds of CPU of a callback that must be found."""


def burn() -> None:
    """Use the CPU."""
    end = thread_time() + SLOW
    while thread_time() < end:
        pass


class Slow(asyncio.Protocol):
    """Takes long for what it receives."""

    def __init__(self, received: asyncio.Event) -> None:
        self.received = received

    def data_received(self, _: bytes, /) -> None:
        burn()
        self.received.set()


class Diverted(asyncio.Protocol):
    """Has another function in the place of `data_received`, as the gateway's connections to servers have for streams."""

    def __init__(self, received: asyncio.Event) -> None:
        self.received = received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.data_received = self.read  # type: ignore[method-assign,assignment]
        transport.set_protocol(self)

    def read(self, _: bytes, /) -> None:
        del self.data_received
        burn()
        self.received.set()


async def receive(kind: type[Slow | Diverted]) -> None:
    """Send a byte to a server with this protocol."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    server = await loop.create_server(lambda: kind(received), "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        await received.wait()
        writer.close()


async def schedule() -> None:
    done = asyncio.Event()

    def slow() -> None:
        burn()
        done.set()

    asyncio.get_running_loop().call_later(0, slow)
    await done.wait()


async def step() -> None:
    await asyncio.sleep(0)
    burn()
    await asyncio.sleep(0)


def measured(main: Coroutine[Any, Any, None]) -> Result:
    """Run a coroutine in a measured loop."""

    async def whole() -> Result:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        loop.probe.clear()
        loop.probe.tick(loop)
        await asyncio.create_task(main)
        await asyncio.sleep(0.01)  # ticks after the pause
        return loop.probe.result()

    return uvloop.run(whole(), loop_factory=MeasuredLoop)


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (partial(receive, Slow), "test_probe.Slow.data_received"),
        (partial(receive, Diverted), "test_probe.Diverted.read"),
        (schedule, "test_probe.schedule.<locals>.slow"),
        (step, "test_probe.step"),
    ],
)
def test_a_slow_callback_is_found_by_its_name(work: Any, name: str) -> None:
    result = measured(work())
    assert result.longest[0].name.endswith(name)
    assert result.callbacks.most == result.longest[0].most >= SLOW
    assert result.pauses.most >= SLOW / 2, "the timer was late"


def test_percentiles_are_exact_to_a_twentieth() -> None:
    histogram = Histogram()
    for microseconds in range(1, 1001):
        histogram.add(microseconds * 1000)
    found = histogram.durations()
    assert found.count == 1000
    assert [found.p50, found.p99, found.p999] == pytest.approx([500e-6, 990e-6, 999e-6], rel=0.05)
    assert found.most == 1e-3


def test_without_values_everything_is_zero() -> None:
    assert Histogram().durations().most == Histogram().durations().p99 == 0
