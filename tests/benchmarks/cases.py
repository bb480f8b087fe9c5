"""The cases: what is measured, of whom, and how often. `CASES` is the table; each is one function from a `Stage` to rows of its section."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from tests.benchmarks import standin
from tests.benchmarks.accounting import LOAD_CORE, PROXY_CORE, Tree, connections
from tests.benchmarks.measures import crowded, first_events, flooded, idle, loaded, streaming
from tests.benchmarks.pauses.observe import BARE, measure, probed
from tests.benchmarks.pauses.traffic import FAST, FAST_RATE, JSON, SLOW, SLOW_RATE
from tests.benchmarks.peers import (
    BY_COST,
    CACHE_AWARE,
    COMPILED,
    GATEWAY,
    NGINX,
    ROUTER,
    AccountingReport,
    Proxy,
    Running,
    Setting,
    compiled_keeping,
    debian,
    gateway_keeping,
    token,
)
from tests.benchmarks.stage import DIRECT, Case, Stage
from tests.benchmarks.streams import crowd
from tests.benchmarks.wire import MODEL, TOKEN, chat

_WITHIN_LOAD = 2.0  # seconds after its begin
_LONG = "a long load"
ALONE = (GATEWAY.name,)


@contextmanager
def _direct(stage: Stage, port: int) -> Iterator[Running]:
    """The upstream itself, measured in the same rotation."""
    index = stage.path("direct")
    index.mkdir()
    yield Running(DIRECT, port, Tree(None), index)


# Beside the peers


async def json(stage: Stage) -> None:
    """Chat requests of 300 bytes, answers of 750 bytes."""
    with standin.json_servers(stage.path("upstream")) as ports, stage.running(Setting(ports)) as alive, _direct(stage, *ports) as direct:
        for proxy in stage.rotation([*alive, direct]):
            await loaded(stage, proxy, "64 connections", chat(), 64, 3.0)
            await loaded(stage, proxy, "1 connection", chat(), 1, 2.0)


async def streams(stage: Stage) -> None:
    """300 streams of 50 events a second, fewer for proxies that cannot carry them."""
    with (
        standin.stream_server(stage.path("upstream"), 50) as port,
        stage.running(Setting((port,))) as alive,
        _direct(stage, port) as direct,
    ):
        for proxy in stage.rotation([*alive, direct]):
            await streaming(stage, proxy, "50 events a second", stage.scale.streams(proxy.streams), 50, 5.0)


async def many(stage: Stage) -> None:
    """2,000 and 5,000 streams of 2 events a second; every turn with a fresh process, since memory is compared with that at rest."""
    with standin.stream_server(stage.path("upstream"), 2) as port:
        for proxy in stage.rounds(list(stage.proxies()), most=2):
            await stage.alone(proxy, Setting((port,)), partial(_growing, stage))


async def _growing(stage: Stage, proxy: Running) -> None:
    rss_at_rest = proxy.tree.rss()
    async with crowd(proxy.port, chat(stream=True)) as clients:
        for count in (2000, 5000):
            await crowded(stage, proxy, clients, f"{count:,} streams", stage.scale.streams(count), 2, 4.0, rss_at_rest)


async def flood(stage: Stage) -> None:
    """One stream of 200,000 events as fast as it is read."""
    count = stage.scale.streams(200_000)
    with (
        standin.stream_server(stage.path("upstream"), 0, count) as port,
        stage.running(Setting((port,))) as alive,
        _direct(stage, port) as direct,
    ):
        for proxy in stage.rotation([*alive, direct]):
            await flooded(stage, proxy, f"{count:,} events", count, 8.0)


async def prompts(stage: Stage) -> None:
    """Requests of 4 KB, 100 KB and 1 MB."""
    sizes = {"4 KB": 4_000, "100 KB": 100_000, "1 MB": 1_000_000}
    with standin.json_servers(stage.path("upstream")) as ports, stage.running(Setting(ports)) as alive:
        for proxy in stage.rotation(alive):
            for name, size in sizes.items():
                await loaded(stage, proxy, name, chat(size=size), 16, 2.0)


async def ttfb(stage: Stage) -> None:
    """New streams while 64 connections request JSON."""
    with standin.json_servers(stage.path("upstream")) as ports, stage.running(Setting(ports)) as alive, _direct(stage, *ports) as direct:
        for proxy in stage.rotation([*alive, direct]):
            await first_events(stage, proxy, "64 connections of JSON beside", 4.0 * stage.scale.seconds)


async def servers(stage: Stage) -> None:
    """1, 16 and 200 servers of one model."""
    with standin.json_servers(stage.path("upstream"), 200) as ports:
        for proxy in stage.rounds(list(stage.proxies((GATEWAY.name, NGINX.name, "vllm-router")))):
            for count in (1, 16, 200):
                await _started_and_loaded(stage, proxy, counted(count, "server"), Setting(ports[:count]))


async def by_cost(stage: Stage) -> None:
    """1, 16 and 200 servers of one model, chosen by what they have cached; prompts of 4 KB."""
    with standin.json_servers(stage.path("upstream"), 200) as ports:
        chosen = list(stage.proxies((GATEWAY.name, ROUTER.name)))
        by_cache = [each for each, base in ((BY_COST, GATEWAY), (CACHE_AWARE, ROUTER)) if base in chosen]
        for proxy in stage.rounds([*chosen, *by_cache]):
            for count in (1, 16, 200):
                await _started_and_loaded(stage, proxy, counted(count, "server"), Setting(ports[:count]), size=4_000)


async def limits_and_ledger(stage: Stage) -> None:
    """The JSON loads of the cases `json` and `prompts`, on gateways that count limits and keep a ledger as well; up to a thousand keys
    ask in turn.

    Writes after the requests are counted: a round ends when the ledger has had the time to write its last rows.
    """
    with standin.json_servers(stage.path("upstream")) as ports, ExitStack() as stack:
        setting, stored = Setting(ports), dict(_ACCOUNTING)
        if (missing := debian("redis-server")) is None:
            in_redis = AccountingReport(limits=True, ledger=True, redis=stack.enter_context(standin.redis(stage.path("redis"))))
            stored["… and the limits in Redis"] = in_redis
            stored[_LEASED] = replace(in_redis, concurrent=False)
        else:
            stage.absent("… and the limits in Redis", missing)
        more = [gateway_keeping(each, name) for name, each in stored.items()]
        if COMPILED.missing() is None:
            more += [compiled_keeping(each, f"{name}, compiled") for name, each in stored.items()]
        alive = stack.enter_context(stage.running(setting, (GATEWAY.name, COMPILED.name, NGINX.name, "vllm-router"), more))
        used = [token(number) for number in setting.key_numbers]
        for proxy in stage.rotation(alive):
            tokens = [TOKEN] if proxy.name == NGINX.name else used[:10] if proxy.name.startswith(_LEASED) else used
            await loaded(stage, proxy, "64 connections", chat(), 64, 4.0, tokens, _WRITTEN)
            await loaded(stage, proxy, "1 connection", chat(), 1, 2.0, tokens, _WRITTEN)
            await loaded(stage, proxy, "1 MB at 16 connections", chat(size=1_000_000), 16, 2.0, tokens, _WRITTEN)


async def limited_streams(stage: Stage) -> None:
    """The streams of the case `streams`, on a gateway that counts limits and keeps a ledger as well."""
    with standin.stream_server(stage.path("upstream"), 50) as port:
        both = [gateway_keeping(_ACCOUNTING[_BOTH], _BOTH)]
        with stage.running(Setting((port,)), (GATEWAY.name, NGINX.name, "vllm-router"), both) as alive:
            for proxy in stage.rotation(alive):
                await streaming(stage, proxy, "50 events a second", stage.scale.streams(proxy.streams), 50, 5.0)


_BOTH = "… with both"
_LEASED = "… and the limits in Redis, 10 busy keys"
_ACCOUNTING: Mapping[str, AccountingReport] = {
    "… with limits": AccountingReport(limits=True),
    "… with a ledger": AccountingReport(ledger=True),
    _BOTH: AccountingReport(limits=True, ledger=True),
}
_WRITTEN = 6.0  # seconds in which the ledger's last rows are written


# The gateway alone


async def keys(stage: Stage) -> None:
    """1, 1,000 and 100,000 keys; requests come with up to a thousand of them in turn."""
    with standin.json_servers(stage.path("upstream")) as ports:
        for proxy in stage.rounds(list(stage.proxies(ALONE))):
            for count in (1, 1000, 100_000):
                setting = Setting(ports, keys=count)
                used = [token(number) for number in setting.key_numbers[:: max(1, count // 1000)]]
                await _started_and_loaded(stage, proxy, counted(count, "key"), setting, used)


async def models(stage: Stage) -> None:
    """1, 100 and 1,000 models, all of one server."""
    with standin.json_servers(stage.path("upstream")) as ports:
        for proxy in stage.rounds(list(stage.proxies(ALONE))):
            for count in (1, 100, 1000):
                names = tuple(f"{MODEL}-{number}" for number in range(count))
                await _started_and_loaded(stage, proxy, counted(count, "model"), Setting(ports, models=names))


async def workers(stage: Stage) -> None:
    """1 and 2 workers, on both cores, which they share with the load."""
    with standin.json_servers(stage.path("upstream")) as ports:
        for proxy in stage.rounds(list(stage.proxies(ALONE))):
            for count in (1, 2):
                setting = Setting(ports, workers=count, cores=(PROXY_CORE, LOAD_CORE))
                await stage.alone(proxy, setting, partial(_split, stage, counted(count, "worker")))


async def _split(stage: Stage, variant: str, proxy: Running) -> None:
    """As `loaded`, and `most`, the share of the connections that the busiest worker has."""
    load = asyncio.create_task(loaded(stage, proxy, variant, chat(), 64, 3.0))
    await asyncio.sleep(_WITHIN_LOAD)
    counts = [connections(each, proxy.port) for each in proxy.tree.workers()]
    await load
    stage.add(proxy.name, variant, {"most": max(counts) / max(1, sum(counts))})


async def pauses(stage: Stage) -> None:
    """Event-loop pauses under a mixed load, beside a bare protocol that proxies the same."""
    rates = (FAST_RATE, FAST_RATE, SLOW_RATE)
    with ExitStack() as stack:
        ports = tuple(stack.enter_context(standin.stream_server(stage.path("upstream"), rate)) for rate in rates)
        setting = Setting(ports, models=(JSON, FAST, SLOW), own_upstream=True)
        both = [gateway_keeping(_ACCOUNTING[_BOTH], _BOTH)]
        chosen = [probed(proxy) for proxy in (*stage.proxies(ALONE), *both)]
        for proxy in stage.rotation(stack.enter_context(stage.running(setting, (), [*chosen, BARE]))):
            await measure(stage, proxy, stage.scale.pauses / stage.scale.rounds)


async def rest(stage: Stage) -> None:
    """Memory with no request yet, of everyone; then the gateway's under a long load."""
    with standin.json_servers(stage.path("upstream")) as ports:
        for proxy in stage.rounds(list(stage.proxies())):
            await stage.alone(proxy, Setting(ports), partial(_at_rest, stage))
        for proxy in stage.proxies(ALONE):
            await stage.alone(proxy, Setting(ports), partial(_growth, stage))


async def _at_rest(stage: Stage, proxy: Running) -> None:
    """`rss` of so many `processes`; `idle`, the share of a core that it takes with nothing to do."""
    sizes = [each.memory_info().rss for each in proxy.tree.processes()]
    stage.add(proxy.name, "at rest", {"rss": sum(sizes), "processes": len(sizes), **await idle(proxy, 2.0 * stage.scale.seconds)})


async def _growth(stage: Stage, proxy: Running) -> None:
    """`rss` every second; `growth`, bytes a minute, is the slope of the second half."""
    sizes: list[int] = []
    seconds = stage.scale.growth
    every = min(1.0, seconds / 10)
    load = asyncio.create_task(loaded(stage, proxy, _LONG, chat(), 16, seconds / stage.scale.seconds))
    while not load.done():
        await asyncio.wait([load], timeout=every)
        sizes.append(proxy.tree.rss())
        proxy.forget_log()
    await load
    half = sizes[len(sizes) // 2 :]
    slope, _ = statistics.linear_regression(range(len(half)), half)
    stage.add(proxy.name, _LONG, {"rss": sizes[-1], "growth": slope * 60 / every})


# Shared parts


def counted(count: int, thing: str) -> str:
    """`1 key`, `1,000 keys`."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


async def _started_and_loaded(
    stage: Stage, proxy: Proxy, variant: str, setting: Setting, tokens: Sequence[str] = (TOKEN,), size: int = 300
) -> None:
    """`ready`, the seconds until it answered; `rss` and `idle` before the load; then as `loaded`."""

    async def round_(running: Running) -> None:
        values = {"ready": running.ready, "rss": running.tree.rss(), **await idle(running, 2.0 * stage.scale.seconds)}
        await loaded(stage, running, variant, chat(setting.models[-1], size), 64, 2.0, tokens)
        stage.add(running.name, variant, values)

    await stage.alone(proxy, setting, round_)


CASES: Mapping[str, Case] = {
    each.__name__: each
    for each in (
        json,
        limits_and_ledger,
        limited_streams,
        streams,
        many,
        flood,
        prompts,
        ttfb,
        servers,
        by_cost,
        keys,
        models,
        workers,
        pauses,
        rest,
    )
}
