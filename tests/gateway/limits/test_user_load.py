"""200 clients against the limits of 1,000 end users under one key: the counts, the ledger and what clients got are equal to the token.

A request reserves as many tokens as it uses. So each end user gets the requests that its limit has room for, in whatever order they come.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import orjson

from gateway.api.settlement import BYTES_PER_TOKEN
from gateway.auth import keys
from tests.gateway.limits.test_user_limits import open_webui
from tests.support.examples import examples
from tests.support.process import Gateway, configuration, gateway
from tests.support.redis_server import redis_server
from tests.support.running import KEY, MODEL, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, USAGE, chat, client, request

USERS, CLIENTS = 1000, 200
EACH = 20
"""Tokens of a request: reserved, and used."""
MOST = 4
"""Requests of an end user within its limit."""
BODY = chat(max_tokens=1)
_RESPONSE = COMPLETION.replace(USAGE, b'"usage":{"prompt_tokens":19,"completion_tokens":1,"total_tokens":20}')
PER_USER = {"tokens_per_day": MOST * EACH + EACH // 2, "requests_per_minute": 1000, "budgets": [{"window": "7d", "tokens": 10**6}]}


async def respond(talk: Conversation) -> None:
    if b" /health " in talk.request.head or b" /v1/models " in talk.request.head:
        await talk.respond(b'{"object":"list","data":[{"id":"tiny","object":"model"}]}')
    else:
        await talk.respond(_RESPONSE)


@asynccontextmanager
async def gateways(
    folder: Path, count: int, workers: int, per_user: dict[str, Any] = PER_USER, **more: Any
) -> AsyncIterator[list[Gateway]]:
    """Run gateways in front of one server, each with its own ledger. They start in threads, because the server runs in this loop."""
    async with scripted(respond) as upstream, AsyncExitStack() as stack:
        config = configuration({"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{upstream.port}"}]}, workers=workers) | more
        limits = {"tokens_per_month": 10**9, "per_user": dict(per_user)}
        config |= {"keys": [{"id": "team-a", "hash": keys.hash_of(KEY), "user_header": "X-OpenWebUI-User-Id", "limits": limits}]}
        started = []
        for number in range(count):
            path = folder / str(number)
            path.mkdir()
            running = ExitStack()
            stack.push_async_callback(asyncio.to_thread, running.close)
            made = gateway(path, config | {"ledger": f"sqlite:///{path}/usage.db"}, seconds=60)
            started.append(await asyncio.to_thread(running.enter_context, made))
        yield started


def lines(user: int) -> tuple[str, ...]:
    return tuple(f"{name}: {value}" for name, value in open_webui(user).items())


async def send_all(ports: Sequence[int], users: Sequence[int]) -> Counter[tuple[int, int]]:
    """Send a request of each of these end users, by 200 clients at once. Returns the responses by end user and status.

    A request that a store without CPU time has not counted (503) is sent again.
    """
    waiting, seen = iter(users), Counter[tuple[int, int]]()

    async def one(port: int) -> None:
        async with client(port) as visitor:
            for user in waiting:
                status = 503
                while status == 503:
                    status = (await visitor.request(request(BODY, extra=lines(user)))).status
                    seen[user, status] += 1
                    await asyncio.sleep(0.2 if status == 503 else 0)

    await asyncio.gather(*(one(ports[number % len(ports)]) for number in range(CLIENTS)))
    return seen


async def counted(ports: Sequence[int]) -> dict[int, int]:
    """Return what the limits of the day have counted for each end user, as each sees it."""
    return {user: used for user, (_, used) in (await shown(ports)).items()}


async def shown(ports: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Return for each end user the holder of its limit of the day, and what that has counted.

    A store without CPU time on a busy machine counts as unavailable (503). The request is sent again.
    """
    found: dict[int, tuple[str, int]] = {}

    async def one(port: int, users: range) -> None:
        async with client(port) as visitor:
            for user in users:
                reply = await visitor.request(request(b"", "/v1/limits", method="GET", extra=lines(user)))
                while reply.status == 503:
                    await asyncio.sleep(0.1)
                    reply = await visitor.request(request(b"", "/v1/limits", method="GET", extra=lines(user)))
                states = orjson.loads(reply.body)["limits"]
                found[user] = next((each["holder"], each["used"]) for each in states if each["limit"] == "tokens_per_day")

    await asyncio.gather(*(one(ports[part % len(ports)], range(part, USERS, 8)) for part in range(8)))
    return found


def recorded(folder: Path) -> dict[int, int]:
    """Return the tokens of each end user in all ledgers."""
    found = Counter[int]()
    for file in folder.glob("*/usage.db"):
        with closing(sqlite3.connect(file)) as database:
            rows = database.execute(
                "SELECT end_user, SUM(prompt_tokens + completion_tokens) FROM gateway_usage WHERE status = 200 GROUP BY end_user"
            ).fetchall()
        found.update({int(user.rpartition("-")[2], 16): tokens for user, tokens in rows})
    return {user: found[user] for user in range(USERS)}


def drawn(seed: int) -> list[int]:
    """Return the end users of the requests: some send far more than their limit, others little."""
    random = Random(seed)
    return random.choices(range(USERS), weights=[1 + user % 7 for user in range(USERS)], k=examples(3000))


async def check(folder: Path, ports: Sequence[int], users: Sequence[int]) -> Counter[int]:
    """Send the requests, and compare the limits with the ledger and the responses. Returns the responses by status."""
    seen, sent = await send_all(ports, users), Counter(users)
    served = {user: seen[user, 200] * EACH for user in range(USERS)}
    await until(lambda: recorded(folder) == served, 60)
    found = await counted(ports)
    for _ in range(60):
        if found == served:
            break
        await asyncio.sleep(0.5)  # a reservation of a refused request is released when the reply of a slow store comes
        found = await counted(ports)
    assert found == served
    for user in range(USERS):
        assert seen[user, 200] <= min(sent[user], MOST)
        if not seen[user, 503]:
            assert seen[user, 200] == min(sent[user], MOST), f"user {user}: {sent[user]} requests"
    return _by_status(seen)


def _by_status(seen: Mapping[tuple[int, int], int]) -> Counter[int]:
    found = Counter[int]()
    for (_, status), count in seen.items():
        found[status] += count
    return found


def test_a_request_reserves_what_it_uses() -> None:
    assert len(orjson.dumps(BODY)) // BYTES_PER_TOKEN + 1 == EACH


async def test_three_workers_count_1000_users_exactly(tmp_path: Path) -> None:
    async with gateways(tmp_path, 1, workers=3) as (one,):
        seen = await check(tmp_path, [one.data], drawn(1))
        assert set(seen) == {200, 429}
        assert one.metric('vllm_gateway_limited_users{holder="key team-a"}') == len(set(drawn(1)) | set(range(USERS)))
        assert one.metric('vllm_gateway_limited_users_overflow_total{holder="key team-a"}') == 0


async def test_two_gateways_count_1000_users_exactly(tmp_path: Path) -> None:
    """A Redis server without CPU time on a busy machine counts as unavailable. Requests that it has not counted are then refused."""
    with redis_server() as redis:
        async with gateways(tmp_path, 2, workers=1, limits_store=redis.url, limits={"on_store_failure": "refuse"}) as both:
            seen = await check(tmp_path, [one.data for one in both], drawn(2))
    assert {200, 429} <= set(seen) <= {200, 429, 503}


async def test_at_the_bound_three_workers_count_each_token_once(tmp_path: Path) -> None:
    few = 100
    async with gateways(tmp_path, 1, workers=3, per_user=PER_USER | {"max_users": few}) as (one,):
        seen = await send_all([one.data], drawn(3))
        served = {user: seen[user, 200] * EACH for user in range(USERS)}
        await until(lambda: recorded(tmp_path) == served, 60)
        found = await shown([one.data])
        overflow = one.metric('vllm_gateway_limited_users_overflow_total{holder="key team-a"}')
        assert one.metric('vllm_gateway_limited_users{holder="key team-a"}') == few
    own = {user: used for user, (holder, used) in found.items() if holder != "key team-a other users"}
    (shared,) = {used for user, (_, used) in found.items() if user not in own}
    assert len(own) == few and shared == MOST * EACH, "all others share the limits of one"
    assert sum(own.values()) + shared == sum(served.values())
    assert all(used <= min(served[user], MOST * EACH) for user, used in own.items())
    assert 0 < overflow <= seen.total()


async def test_a_restart_restores_the_budgets_of_users(tmp_path: Path) -> None:
    users = [user for user in range(300) for _ in range(user % 3)]
    async with gateways(tmp_path, 1, workers=2) as (one,):
        await send_all([one.data], users)
        await until(lambda: sum(recorded(tmp_path).values()) == len(users) * EACH, 60)
        config = one.folder
    async with AsyncExitStack() as stack:
        running = ExitStack()
        stack.push_async_callback(asyncio.to_thread, running.close)
        again = await asyncio.to_thread(running.enter_context, gateway(config, None, ready=False))
        await until(lambda: _is_restored(again), 60)
        found = await counted([again.data])
    assert found == {user: EACH * (user % 3) if user < 300 else 0 for user in range(USERS)}


def _is_restored(one: Gateway) -> bool:
    return bool(one.get("/status").json()["budgets"]["restored"])
