"""Shared limits of several processes under load: exactly the limit is admitted, and a killed process loses no count."""

from __future__ import annotations

import asyncio
import os
import re
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
from gateway.limits.redis.store import LEASE
from tests.faults.conftest import FULL
from tests.support.process import Gateway, configuration, gateway
from tests.support.redis_server import RedisServer, counted, redis_server
from tests.support.running import KEY, MODEL, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, HELLO, ROLE, USAGE, Client, chat, client, request

SECONDS = 20.0 if FULL else 8.0
CONNECTIONS = 6
PAUSE = 0.02
"""Seconds for which a client waits after a refusal."""
REFUSING = {"on_store_failure": "refuse"}
USED = 20
"""Tokens of a response, by its usage. They are about as many as its reservation, since a reservation that is open when the load ends
was not available for other requests."""
_RESPONSE = COMPLETION.replace(USAGE, b'"usage":{"prompt_tokens":19,"completion_tokens":1,"total_tokens":20}')


async def respond(talk: Conversation) -> None:
    if b" /health " in talk.request.head or b" /v1/models " in talk.request.head:
        await talk.respond(b'{"object":"list","data":[{"id":"tiny","object":"model"}]}')
    elif talk.request.json.get("stream"):
        await talk.begin_stream()
        for each in (ROLE, HELLO):
            await talk.chunk(each)
        await talk.closed_by_peer()
    else:
        await talk.respond(_RESPONSE)


@asynccontextmanager
async def gateways(folder: Path, count: int, of_key: dict[str, Any], **more: Any) -> AsyncIterator[list[Gateway]]:
    """Run ``count`` gateways in front of one server. ``more`` is added to their configuration."""
    server = more.pop("server", {})
    async with scripted(respond) as upstream, AsyncExitStack() as stack:
        model = {"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{upstream.port}"}]}
        config = configuration(model, **server) | more
        config["keys"] = [{"id": "team-a", "hash": keys.hash_of(KEY), "limits": of_key}]
        yield await asyncio.gather(*(stack.enter_async_context(_started(path, config)) for path in _folders(folder, count)))


def _folders(folder: Path, count: int) -> list[Path]:
    """Create a folder for each gateway."""
    folders = [folder / str(number) for number in range(count)]
    for path in folders:
        path.mkdir()
    return folders


@asynccontextmanager
async def _started(folder: Path, config: dict[str, Any]) -> AsyncIterator[Gateway]:
    """Start a gateway and wait for it in a thread, since its server runs in this event loop."""
    with ExitStack() as stack:
        running = await asyncio.to_thread(stack.enter_context, gateway(folder, config, seconds=60))
        try:
            yield running
        finally:
            await asyncio.to_thread(stack.close)


@dataclass
class Load:
    """The responses by status. ``refused``: seconds from the first request to the start of the last refusal by a rate
    limit. ``elapsed``: seconds from the first request to the last response."""

    seen: Counter[int] = field(default_factory=Counter)
    refused: float = 0.0
    elapsed: float = 0.0

    def assert_admitted(self, limit: int, each: int = 1) -> None:
        """Check the admitted total against a limit per minute, of which each response uses ``each``. It is at least the amount
        available at the last refusal, and at most the amount available at the end."""
        assert 0.98 * limit * (1 + self.refused / 60) <= self.seen[200] * each <= 1.02 * limit * (1 + self.elapsed / 60)


async def hammer(
    ports: Sequence[int], seconds: float, body: dict[str, object], *, until_refused: bool = False, load: Load | None = None
) -> Load:
    """Send requests one after the other for ``seconds``. ``until_refused``: continue until a rate limit refused a request."""
    data, load, began = request(body), load or Load(), monotonic()

    async def one(port: int) -> None:
        async with client(port) as visitor:
            while (sent_at := monotonic() - began) < seconds or (until_refused and not load.seen[429]):
                status = (await visitor.request(data)).status
                load.seen[status] += 1
                if status == 429:
                    load.refused = max(load.refused, sent_at)
                    await asyncio.sleep(PAUSE)

    await asyncio.gather(*(one(port) for port in ports for _ in range(CONNECTIONS)))
    load.elapsed = monotonic() - began
    return load


@pytest.mark.parametrize(
    ("requests", "tokens", "limit", "each"), [(600, 60_000, 600, 1), (60_000, 12_000, 12_000, USED)], ids=["requests", "tokens"]
)
async def test_three_gateways_on_one_redis_admit_exactly_the_limit(
    tmp_path: Path, requests: int, tokens: int, limit: int, each: int
) -> None:
    """The key has two limits, of which only one is reached. ``each``: the amount of that limit that a response uses.

    A Redis server without CPU time on a busy machine counts as unavailable. Requests that it has not counted are then refused.
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


async def test_counts_outlive_a_worker_and_its_slots_do_not(tmp_path: Path) -> None:
    async with gateways(tmp_path, 1, {"tokens_per_day": 1000, "concurrent": 1}) as (one,):
        async with client(one.data) as visitor:
            await begin(visitor)
            assert await status(one) == 429
            os.kill(one.workers()[0], signal.SIGKILL)
        await until(lambda: one.get("/status").json()["workers"][0]["restarts"] == 1 and one.get("/readyz").status_code == 200, 30)
        assert await status(one, max_tokens=900) == 429, "what the dead one had reserved stays counted"
        assert await status(one, max_tokens=1) == 200, "and its place is free"


async def begin(visitor: Client) -> None:
    """Start a stream that stays open."""
    data = request(chat(stream=True, max_tokens=500))
    visitor.send(data)
    while b" 503 " in await visitor.reader.readuntil(b"\r\n\r\n"):  # the store did not respond in time
        visitor.send(data)
    await visitor.reader.readuntil(HELLO)


async def test_the_slots_of_a_killed_gateway_are_freed(tmp_path: Path) -> None:
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


async def test_a_killed_gateway_loses_no_more_than_its_lease(tmp_path: Path) -> None:
    """Its last lease stays charged. The other gateway returns all of its leases, and its usage is exact."""
    body, loads = chat(max_tokens=1), (Load(), Load())
    with redis_server() as redis:
        more = {"limits_store": redis.url, "limits": REFUSING}
        async with gateways(tmp_path, 2, {"tokens_per_day": 10**9}, **more) as (one, two):
            survivor = asyncio.create_task(hammer([one.data], SECONDS / 2, body, load=loads[0]))
            victim = asyncio.create_task(hammer([two.data], SECONDS, body, load=loads[1]))
            await until(lambda: from_leases(two) > 100, 60)
            kill(two)
            with pytest.raises((OSError, EOFError)):
                await victim
            await survivor
            assert set(loads[0].seen) <= {200, 503} and from_leases(one) > 0
            with redis.client() as each:
                await until(lambda: len([*each.scan_iter("vllm-gateway:reserved *")]) <= 1, 30)  # that of the killed one
                counted = float(each.hget("vllm-gateway:key team-a", "dt") or 0)
            lost = counted - USED * (loads[0].seen[200] + loads[1].seen[200])
            assert 0 <= lost <= 6 * USED * loads[1].seen[200]


async def test_a_gateway_that_stops_returns_its_leases(tmp_path: Path) -> None:
    """The usage of the requests is counted, and nothing else."""
    load = Load()
    with redis_server() as redis:
        more = {"limits_store": redis.url, "limits": REFUSING}
        async with gateways(tmp_path, 1, {"tokens_per_day": 10**9}, **more) as (one,):
            requests = asyncio.create_task(hammer([one.data], SECONDS, chat(max_tokens=1), load=load))
            await until(lambda: from_leases(one) > 100, 60)
            stopped = asyncio.create_task(asyncio.to_thread(one.stop))
            with pytest.raises((OSError, EOFError)):
                await requests
            assert await stopped == 0
            with redis.client() as each:
                assert counted(each) == [b"vllm-gateway:key team-a"]
                await until(lambda: float(each.hget("vllm-gateway:key team-a", "dt") or 0) == USED * load.seen[200], 30)


def from_leases(one: Gateway) -> float:
    """Return the requests that a gateway has admitted from leases."""
    found = re.findall(r'^vllm_gateway_limits_store_admissions_total{source="lease"} (\S+)$', one.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


async def status(one: Gateway, max_tokens: int = 1) -> int:
    """Return the status of a request. Retry it if the limits store did not respond in time."""
    async with client(one.data) as visitor:
        while (found := (await visitor.request(request(chat(max_tokens=max_tokens)))).status) == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found


def kill(one: Gateway) -> None:
    """Kill the gateway and its workers at once, so that no process cleans up."""
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
            await until(lambda: all("is available again" in one.output for one in three), 30)
            assert [await in_time(one) for one in three] == [200, 200, 200]


async def test_a_redis_that_stalls_under_load_counts_all_usage(tmp_path: Path) -> None:
    """The count is exact. It includes commands that Redis had queued, commands whose reply was not read, and requests that ended
    meanwhile."""
    with redis_server() as redis:
        more = {"limits_store": redis.url, "limits": REFUSING}
        async with gateways(tmp_path, 3, {"tokens_per_day": 10**9, "concurrent": 100}, **more) as three:
            load = asyncio.create_task(hammer([one.data for one in three], SECONDS / 2, chat(max_tokens=300)))
            for _ in range(2):
                await stall(redis, SECONDS / 10)
            seen = (await load).seen
            await until(lambda: all("is available again" in one.output for one in three), 30)
            assert seen.keys() == {200, 503}
            with redis.client() as each:
                await until(lambda: counted(each) == [b"vllm-gateway:key team-a"], 30)
                assert float(each.hget("vllm-gateway:key team-a", "dt") or 0) == seen[200] * USED


async def stall(redis: RedisServer, pause: float) -> None:
    """Freeze Redis after ``pause`` seconds, and resume it after ``pause`` more."""
    await asyncio.sleep(pause)
    redis.signal(signal.SIGSTOP)
    await asyncio.sleep(pause)
    redis.signal(signal.SIGCONT)


async def in_time(one: Gateway) -> int:
    """Send a request until its limit admits it. Return its status."""
    while (found := await status(one)) == 429:  # noqa: ASYNC110  # nothing tells that a bucket has filled
        await asyncio.sleep(0.05)
    return found


async def restart(redis: RedisServer, pause: float) -> None:
    """Stop Redis after ``pause`` seconds, and start it after ``pause`` more."""
    await asyncio.sleep(pause)
    await asyncio.to_thread(redis.stop)
    await asyncio.sleep(pause)
    await asyncio.to_thread(redis.start)
