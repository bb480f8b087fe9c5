"""The cases: what is measured, and how. `CASES` is the table.

Each is one function from a `Stage` to rows of its section. Times are seconds, sizes bytes; `cpu` is the proxy's CPU seconds for one
request or one event. The rule: a turn that is not free of errors says so in its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

import httpx2

from benchmarks import standin
from benchmarks.accounting import cost
from benchmarks.load import difference, load, whole_answer
from benchmarks.peers import Running, Setting
from benchmarks.stage import DIRECT, Stage
from benchmarks.streams import Crowd, crowd, percentile
from benchmarks.wire import chat

Case = Callable[[Stage], Awaitable[None]]
_SETTLE = 1.0  # seconds between the opening of streams and the measurement
_WARM = 1.0  # seconds of load before a proxy's first measurement


@contextmanager
def _direct(stage: Stage, port: int) -> Iterator[Running]:
    """The upstream itself, as one of those who have turns."""
    place = stage.place("direct")
    place.mkdir()
    yield Running(DIRECT, port, None, place)


# JSON requests


async def json(stage: Stage) -> None:
    """Chat requests of 300 bytes, answers of 750 bytes."""
    with standin.json_servers(stage.place("upstream")) as ports, stage.running(Setting(ports)) as alive, _direct(stage, *ports) as direct:
        for proxy in stage.turns([*alive, direct]):
            await loaded(stage, proxy, "64 connections", chat(), 64, 3.0)
            await loaded(stage, proxy, "1 connection", chat(), 1, 2.0)


async def loaded(stage: Stage, proxy: Running, variant: str, body: bytes, connections: int, seconds: float) -> None:
    """One turn under wrk's load: `cpu`, `rate`, `p50`, `p99`."""
    fault, length = await _inspected(proxy.port, body)
    if fault:
        stage.add(proxy.name, variant, {}, (fault,))
        return
    if stage.section.find(proxy.name, variant) is None:
        await load(proxy.port, body, length, connections, _WARM, stage.workshop())
    with cost(proxy.tree) as spent:
        run = await load(proxy.port, body, length, connections, seconds * stage.scale.seconds, stage.workshop())
    values = {"rate": run.requests / run.seconds, "p50": run.p50, "p99": run.p99}
    stage.add(proxy.name, variant, values | _cpu(proxy, spent.proxy, run.requests), run.faults)


async def _inspected(port: int, body: bytes) -> tuple[str | None, int]:
    """What is wrong with a proxy's answer, if anything, and how long its body is."""
    try:
        status, answer = await asyncio.to_thread(whole_answer, port, body)
    except httpx2.HTTPError as error:
        return f"no answer: {error!r}", 0
    return difference(status, answer), len(answer)


def _cpu(proxy: Running, seconds: float, count: int) -> dict[str, float]:
    """CPU for each of so many; nothing where there is no proxy or nothing came."""
    return {"cpu": seconds / count} if proxy.tree and count else {}


# Streams


async def streams(stage: Stage) -> None:
    """300 streams of 50 events a second, fewer for who cannot carry them."""
    with (
        standin.stream_server(stage.place("upstream"), 50) as port,
        stage.running(Setting((port,))) as alive,
        _direct(stage, port) as direct,
    ):
        for proxy in stage.turns([*alive, direct]):
            await streaming(stage, proxy, "50 events a second", stage.scale.streams(proxy.streams), 50, 5.0)


async def streaming(stage: Stage, proxy: Running, variant: str, count: int, rate: float, seconds: float) -> None:
    """One turn with so many streams: `cpu`, `rate`, `p50`, `p99` of an event's delay; `load`, the CPU of the clients themselves."""
    async with crowd(proxy.port, chat(stream=True)) as clients:
        try:
            await clients.grow(count)
            await asyncio.sleep(_SETTLE * stage.scale.seconds)
            values = await window(proxy, clients, seconds * stage.scale.seconds)
        except TimeoutError:
            stage.add(proxy.name, variant, {}, (f"only {len(clients.clients)} of {count} streams opened in time", *clients.faults()))
            return
        values["streams"] = count
        missing = () if values["rate"] > 0.95 * count * rate else (f"saturated: {values['rate'] / (count * rate):.0%} of the events came",)
        stage.add(proxy.name, variant, values, (*clients.faults(), *missing))


async def window(proxy: Running, clients: Crowd, seconds: float) -> dict[str, float]:
    """What so many seconds cost and brought."""
    with clients.window(), cost(proxy.tree) as spent:
        before = monotonic()
        await asyncio.sleep(seconds)
        took = monotonic() - before
    values = {"rate": clients.events / took, "load": spent.own / took}
    delays = {"p50": percentile(clients.delays, 0.5), "p99": percentile(clients.delays, 0.99)}
    return values | {name: delay / 1e9 for name, delay in delays.items() if delay is not None} | _cpu(proxy, spent.proxy, clients.events)


CASES: Mapping[str, Case] = {"json": json, "streams": streams}
