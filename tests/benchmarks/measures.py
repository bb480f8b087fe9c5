"""One turn of one proxy: load it, look at what it costs, put it down.

Times are seconds, sizes bytes; `cpu` is the proxy's CPU seconds for one request or one event. The rule: a turn that is not free of
errors says so in its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

import httpx2

from tests.benchmarks.accounting import cost
from tests.benchmarks.load import Load, difference, load, whole_response
from tests.benchmarks.peers import Running
from tests.benchmarks.stage import Stage
from tests.benchmarks.streams import Client, Crowd, crowd, percentile
from tests.benchmarks.wire import TOKEN, chat, prompt

_SETTLE = 1.0  # seconds between the opening of streams and the measurement
_WARM = 1.0  # seconds of load before a proxy's first measurement
_PROBE_EVERY = 0.025


async def loaded(
    stage: Stage,
    proxy: Running,
    variant: str,
    body: bytes,
    connections: int,
    seconds: float,
    tokens: Sequence[str] = (TOKEN,),
    behind: float = 0.0,
) -> None:
    """JSON requests as fast as they are answered: `cpu`, `rate`, `p50`, `p99`, `p999`.

    `behind`: seconds after the last response during which the proxy's work is still counted; `control` is then what the gateway's
    control has taken of `cpu`.
    """
    fault, length = await inspected(proxy.port, body)
    if fault:
        stage.add(proxy.name, variant, {}, (fault,))
        return
    if stage.section.find(proxy.name, variant) is None:
        await load(proxy.port, body, length, connections, _WARM, stage.workshop(), tokens)
    with cost(proxy.tree) as spent:
        run = await load(proxy.port, body, length, connections, seconds * stage.scale.seconds, stage.workshop(), tokens)
        await asyncio.sleep(behind)
    values = latencies(run) | per_unit(proxy, spent.proxy, run.requests)
    if behind and run.requests and proxy.tree.workers():
        values["control"] = spent.first / run.requests
    stage.add(proxy.name, variant, values, run.faults)


def latencies(run: Load) -> dict[str, float]:
    """The values of a run of wrk."""
    return {"rate": run.requests / run.seconds, "p50": run.p50, "p99": run.p99, "p999": run.p999}


def per_unit(proxy: Running, seconds: float, count: int) -> dict[str, float]:
    """Return the CPU time per request; empty without a proxy or without responses."""
    return {"cpu": seconds / count} if proxy.tree.pid and count else {}


async def inspected(port: int, body: bytes) -> tuple[str | None, int]:
    """Describe what is wrong with a proxy's response, if anything, and return the size of its body."""
    try:
        status, response = await asyncio.to_thread(whole_response, port, body)
    except httpx2.HTTPError as error:
        return f"no answer: {error!r}", 0
    return difference(status, response), len(response)


async def streaming(stage: Stage, proxy: Running, variant: str, count: int, rate: float, seconds: float) -> None:
    """So many open streams: what `window` says, and how many there were."""
    async with crowd(proxy.port, chat(stream=True)) as clients:
        await crowded(stage, proxy, clients, variant, count, rate, seconds)


async def crowded(
    stage: Stage, proxy: Running, clients: Crowd, variant: str, count: int, rate: float, seconds: float, rss_at_rest: int | None = None
) -> None:
    """Let a crowd grow to so many streams and measure; `rss` is memory for each stream, where it is known what there was before."""
    try:
        await clients.grow(count)
    except TimeoutError:
        stage.add(proxy.name, variant, {}, (f"only {clients.opened} of {count} streams opened in time", *clients.faults()))
        return
    await asyncio.sleep(_SETTLE * stage.scale.seconds)
    values = {"streams": count} | await window(proxy, clients, seconds * stage.scale.seconds)
    if rss_at_rest is not None:
        values["rss"] = (proxy.tree.rss() - rss_at_rest) / count
    came = values["rate"] / (count * rate)
    stage.add(proxy.name, variant, values, (*clients.faults(), *([] if came > 0.95 else [f"only {came:.0%} of the events came in time"])))


async def window(proxy: Running, clients: Crowd, seconds: float) -> dict[str, float]:
    """So many seconds of open streams: `cpu`, `rate`, and `p50`, `p99` and `p999` of an event's delay; `load`, the share of a core
    that the clients took.
    """
    with clients.window(), cost(proxy.tree) as spent:
        before = monotonic()
        await asyncio.sleep(seconds)
        took = monotonic() - before
    values = {"rate": clients.events / took, "load": spent.own / took}
    return values | delays(clients.delays) | per_unit(proxy, spent.proxy, clients.events)


def delays(nanoseconds: list[int]) -> dict[str, float]:
    """`p50`, `p99` and `p999` (99.9%) in seconds; nothing without any."""
    found = {name: percentile(nanoseconds, share) for name, share in {"p50": 0.5, "p99": 0.99, "p999": 0.999}.items()}
    return {name: value / 1e9 for name, value in found.items() if value is not None}


async def flooded(stage: Stage, proxy: Running, variant: str, count: int, seconds: float) -> None:
    """One stream as fast as it goes, of `count` events or for so long: `cpu`, `rate`."""
    async with crowd(proxy.port, chat(stream=True)) as clients:
        with cost(proxy.tree) as spent:
            before = monotonic()
            await clients.grow(1)
            whole = await _ended(clients.clients[0], seconds)
            took = monotonic() - before
        lacking = whole and clients.events < count + 1
        faults = [*clients.faults(), *([f"{clients.events} of {count + 1} events"] if lacking else [])]
        values = {"rate": clients.events / took, "load": spent.own / took} | per_unit(proxy, spent.proxy, clients.events)
        stage.add(proxy.name, variant, values, tuple(faults))


async def idle(proxy: Running, seconds: float) -> dict[str, float]:
    """`idle`: the share of a core that a proxy takes with nothing to do."""
    with cost(proxy.tree) as spent:
        await asyncio.sleep(seconds)
    return {"idle": spent.proxy / seconds}


async def _ended(client: Client, seconds: float) -> bool:
    done, _ = await asyncio.wait([client.ended], timeout=seconds)
    return bool(done)


async def first_events(stage: Stage, proxy: Running, variant: str, seconds: float) -> None:
    """New streams while 64 connections request JSON: `p50`, `p99` and `p999` from connecting to the first event; `rate` of the JSON
    requests.
    """
    _, length = await inspected(proxy.port, chat())
    loading = asyncio.create_task(load(proxy.port, chat(), length, 64, seconds + 1, stage.workshop()))
    try:
        await asyncio.sleep(0.5)
        async with crowd(proxy.port, prompt(), "/v1/completions") as clients:
            taken = await _probe(clients, seconds)
            run = await loading
            stage.add(proxy.name, variant, {"rate": run.requests / run.seconds} | delays(taken), (*clients.faults(), *run.faults))
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def _probe(clients: Crowd, seconds: float) -> list[int]:
    """Open one stream after the other; nanoseconds to the first event of each."""
    taken: list[int] = []
    deadline = monotonic() + seconds
    while monotonic() < deadline:
        taken.append(await clients.first_event())
        await asyncio.sleep(_PROBE_EVERY)
    return taken
