"""Limits that several processes share, under load: as much is admitted as the limit says, and nothing is lost with who dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from gateway.auth import keys
from gateway.limits.redis_store import LEASE
from tests.faults.conftest import FULL
from tests.support.process import Gateway, configuration, gateway
from tests.support.redis_server import RedisServer, redis_server
from tests.support.running import KEY, MODEL, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, HELLO, ROLE, USAGE, Client, chat, client, request

SECONDS = 20.0 if FULL else 8.0
CONNECTIONS = 6
PAUSE = 0.02
"""Seconds for which a client waits after a refusal."""
REFUSING = {"on_store_failure": "refuse"}
USED = 20
"""Tokens that an answer has used, by its usage: about what is reserved for it, since what is still reserved when the load ends was not
there for others."""
_ANSWER = COMPLETION.replace(USAGE, b'"usage":{"prompt_tokens":19,"completion_tokens":1,"total_tokens":20}')


async def respond(talk: Conversation) -> None:
    if b" /health " in talk.request.head or b" /v1/models " in talk.request.head:
        await talk.respond(b'{"object":"list","data":[{"id":"tiny","object":"model"}]}')
    elif talk.request.json.get("stream"):
        await talk.begin_stream()
        for each in (ROLE, HELLO):
            await talk.chunk(each)
        await talk.closed_by_peer()
    else:
        await talk.respond(_ANSWER)


@asynccontextmanager
async def gateways(folder: Path, count: int, of_key: dict[str, Any], **more: Any) -> AsyncIterator[list[Gateway]]:
    """As many gateways in front of one server; ``more`` goes into their configuration."""
    server = more.pop("server", {})
    async with scripted(respond) as upstream, AsyncExitStack() as stack:
        model = {"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{upstream.port}"}]}
        config = configuration(model, **server) | more
        config["keys"] = [{"id": "team-a", "hash": keys.hash_of(KEY), "limits": of_key}]
        yield await asyncio.gather(*(stack.enter_async_context(_started(place, config)) for place in _places(folder, count)))


def _places(folder: Path, count: int) -> list[Path]:
    """A folder for each."""
    places = [folder / str(number) for number in range(count)]
    for place in places:
        place.mkdir()
    return places


@asynccontextmanager
async def _started(place: Path, config: dict[str, Any]) -> AsyncIterator[Gateway]:
    """A gateway, waited for beside the loop, on which its server runs."""
    with ExitStack() as stack:
        running = await asyncio.to_thread(stack.enter_context, gateway(place, config, seconds=60))
        try:
            yield running
        finally:
            await asyncio.to_thread(stack.close)


@dataclass
class Load:
    """The answers by status. Seconds from the first request: ``refused`` to the last one that was refused for its rate, at least;
    ``elapsed`` to the last answer."""

    seen: Counter[int] = field(default_factory=Counter)
    refused: float = 0.0
    elapsed: float = 0.0

    def assert_admitted(self, limit: int, each: int = 1) -> None:
        """As much as a limit for a minute says, of which an answer takes ``each``: all that there was when somebody was refused, and no
        more than there was in the end."""
        assert 0.98 * limit * (1 + self.refused / 60) <= self.seen[200] * each <= 1.02 * limit * (1 + self.elapsed / 60)


async def hammer(ports: Sequence[int], seconds: float, body: dict[str, object], *, until_refused: bool = False) -> Load:
    """Send requests one after the other for so long; ``until_refused``: longer, until one has been refused for its rate."""
    data, load, began = request(body), Load(), monotonic()

    async def one(port: int) -> None:
        async with client(port) as visitor:
            while (asked := monotonic() - began) < seconds or (until_refused and not load.seen[429]):
                status = (await visitor.ask(data)).status
                load.seen[status] += 1
                if status == 429:
                    load.refused = max(load.refused, asked)
                    await asyncio.sleep(PAUSE)

    await asyncio.gather(*(one(port) for port in ports for _ in range(CONNECTIONS)))
    load.elapsed = monotonic() - began
    return load


@pytest.mark.parametrize(
    ("requests", "tokens", "limit", "each"), [(600, 60_000, 600, 1), (60_000, 12_000, 12_000, USED)], ids=["requests", "tokens"]
)
async def test_three_gateways_on_one_redis_admit_what_the_limit_says(
    tmp_path: Path, requests: int, tokens: int, limit: int, each: int
) -> None:
    """A key with both limits, of which one holds it; ``each``: what an answer takes of that.

    A Redis that gets no CPU time on a busy machine counts as away: nobody is let in then whom it has not counted.
    """
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens}
    with redis_server() as redis:
        async with gateways(tmp_path, 3, limits, limits_store=redis.url, limits=REFUSING) as three:
            load = await hammer([one.data for one in three], SECONDS, chat(max_tokens=1), until_refused=True)
    assert {200, 429} <= set(load.seen) <= {200, 429, 503}
    load.assert_admitted(limit, each)


async def test_the_workers_of_one_gateway_need_no_store(tmp_path: Path) -> None:
    async with gateways(tmp_path, 1, {"requests_per_minute": 600}, server={"workers": 3}) as (one,):
        load = await hammer([one.data] * 3, SECONDS, chat(max_tokens=1), until_refused=True)
        assert set(load.seen) == {200, 429}
        load.assert_admitted(600)


async def test_counts_outlive_a_worker_and_its_places_do_not(tmp_path: Path) -> None:
    async with gateways(tmp_path, 1, {"tokens_per_day": 1000, "concurrent": 1}) as (one,):
        async with client(one.data) as visitor:
            await begin(visitor)
            assert await status(one) == 429
            os.kill(one.workers()[0], signal.SIGKILL)
        await until(lambda: one.get("/status").json()["workers"][0]["restarts"] == 1 and one.get("/readyz").status_code == 200, 30)
        assert await status(one, max_tokens=900) == 429, "what the dead one had reserved stays counted"
        assert await status(one, max_tokens=1) == 200, "and its place is free"


async def begin(visitor: Client) -> None:
    """Have a stream that stays."""
    data = request(chat(stream=True, max_tokens=500))
    visitor.send(data)
    while b" 503 " in await visitor.reader.readuntil(b"\r\n\r\n"):  # its store has had no time to answer
        visitor.send(data)
    await visitor.reader.readuntil(HELLO)


async def test_the_places_of_a_gateway_that_is_killed_come_back(tmp_path: Path) -> None:
    with redis_server() as redis:
        more = {"limits_store": redis.url, "limits": REFUSING}
        async with gateways(tmp_path, 2, {"concurrent": 2}, **more) as (one, two), client(one.data) as stays:
            await begin(stays)
            async with client(two.data) as goes:
                await begin(goes)
                assert await status(one) == 429
                kill(two)
            killed = monotonic()
            while await status(one) == 429:
                assert monotonic() - killed < LEASE + 30, "its lease is over"
                await asyncio.sleep(0.1)
            async with client(one.data) as third:
                await begin(third)
                assert await status(one) == 429, "the other one's lease is renewed"


async def status(one: Gateway, max_tokens: int = 1) -> int:
    """Of a request; of one for which the limits' store has had no time there is none."""
    async with client(one.data) as visitor:
        while (found := (await visitor.ask(request(chat(max_tokens=max_tokens)))).status) == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found


def kill(one: Gateway) -> None:
    """The gateway and its workers at once, so that nobody tidies up."""
    workers = [psutil.Process(pid) for pid in one.workers().values()]
    for each in workers:
        each.kill()
    one.process.kill()
    one.process.wait()


@pytest.mark.parametrize(("policy", "meanwhile"), [("allow", {200, 429}), ("refuse", {503, 429, 200})])
async def test_a_redis_that_stops_and_starts_under_load(tmp_path: Path, policy: str, meanwhile: set[int]) -> None:
    with redis_server() as redis:
        more = {"limits_store": redis.url, "limits": {"on_store_failure": policy}}
        async with gateways(tmp_path, 3, {"requests_per_minute": 6000}, **more) as three:
            load = asyncio.create_task(hammer([one.data for one in three], SECONDS, chat(max_tokens=1)))
            await restart(redis, SECONDS / 4)
            seen = (await load).seen
            assert seen.keys() <= meanwhile
            assert (seen[503] > 0) is (policy == "refuse")
            await until(lambda: all("is available again" in one.said for one in three), 30)
            assert [await in_time(one) for one in three] == [200, 200, 200]


async def test_a_redis_that_stalls_under_load_counts_what_was_used(tmp_path: Path) -> None:
    """To the token: of what waited in it, of what it had run when nobody heard of it, and of what ended meanwhile."""
    with redis_server() as redis:
        more = {"limits_store": redis.url, "limits": REFUSING}
        async with gateways(tmp_path, 3, {"tokens_per_day": 10**9, "concurrent": 100}, **more) as three:
            load = asyncio.create_task(hammer([one.data for one in three], SECONDS / 2, chat(max_tokens=300)))
            for _ in range(2):
                await stall(redis, SECONDS / 10)
            seen = (await load).seen
            await until(lambda: all("is available again" in one.said for one in three), 30)
            assert seen.keys() == {200, 503}
            with redis.client() as each:
                await until(lambda: [bytes(name) for name in each.scan_iter()] == [b"vllm-gateway:key team-a"], 30)
                assert float(each.hget("vllm-gateway:key team-a", "dt") or 0) == seen[200] * USED


async def stall(redis: RedisServer, pause: float) -> None:
    """Freeze it after a while, and let it go on after another."""
    await asyncio.sleep(pause)
    redis.signal(signal.SIGSTOP)
    await asyncio.sleep(pause)
    redis.signal(signal.SIGCONT)


async def in_time(one: Gateway) -> int:
    """The status of a request that is made until its limit lets it pass."""
    while (found := await status(one)) == 429:  # noqa: ASYNC110  # nothing tells that a bucket has filled
        await asyncio.sleep(0.05)
    return found


async def restart(redis: RedisServer, pause: float) -> None:
    """Stop it after a while, and start it after another."""
    await asyncio.sleep(pause)
    await asyncio.to_thread(redis.stop)
    await asyncio.sleep(pause)
    await asyncio.to_thread(redis.start)
