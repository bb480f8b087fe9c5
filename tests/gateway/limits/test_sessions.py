"""Budgets of sessions: a table of bounded size, the same decisions with a store, and the errors and headers that clients see."""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.api.media_urls import InlineMedia
from gateway.auth import keys
from gateway.limits import Limiter
from gateway.limits.decision import Amounts
from gateway.limits.expected_use import estimate_request
from gateway.limits.key_limits import KeyLimits
from gateway.limits.redis.store import RedisStore
from gateway.limits.reservation import reservation_of
from gateway.limits.sessions import CELLS, IDLE, SETS_OF_HOLDER, WAYS, find_entry, session_of
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import moment
from gateway.snapshot.snapshot import Allowance, Budget, Limits, Model, Snapshot
from gateway.telemetry.metrics import WorkerMetrics
from tests.support.examples import examples
from tests.support.process import configuration, gateway, launched
from tests.support.redis_server import redis_server
from tests.support.running import KEY, Served, key, model, serving, shared_counters
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, Reply, chat, request, request_once

NOW = 1_800_000_000.0
USED = 5
"""Tokens in the usage of ``COMPLETION``."""
BUDGET = Budget("session", tokens=100)


@pytest.mark.parametrize(
    ("headers", "document", "name"),
    [
        ({}, {}, None),
        ({b"x-session-id": b"run-1"}, {"metadata": {"session_id": "other"}}, "run-1"),
        ({}, {"metadata": {"session_id": "run:2"}}, "run:2"),
        ({}, {"metadata": {"session_id": 7}}, None),
        ({}, {"metadata": "run"}, None),
        ({b"x-session-id": b""}, {}, None),
        ({b"x-session-id": b"with a space"}, {}, "sha256:"),
        ({}, {"metadata": {"session_id": "x" * 65}}, "sha256:"),
        ({}, {"metadata": {"session_id": "\udc00"}}, "sha256:"),
    ],
)
def test_the_name_of_a_session(headers: Mapping[bytes, bytes], document: Mapping[str, Any], name: str | None) -> None:
    found = session_of(headers, document)
    if name is None or not name.startswith("sha256:"):
        assert found == name
    else:
        assert found is not None and found.startswith("sha256:") and len(found) == 39


def test_a_holder_has_a_bounded_number_of_sessions() -> None:
    """Use many more sessions than fit: only the entries of the holder's sets are used, and the rest is evicted."""
    cells, count = [0.0] * CELLS, 3 * SETS_OF_HOLDER * WAYS
    evictions = sum(find_entry(cells, 0, "key a", f"s{number}", NOW + number).evicted for number in range(count))
    used = [number for number in cells[::4] if number]
    assert len(used) == count - evictions <= SETS_OF_HOLDER * WAYS


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40_000)), max_size=60))
def test_a_session_is_found_until_it_is_idle(steps: list[tuple[int, int]]) -> None:
    """Compare with a dictionary of what each session has counted."""
    cells, wall, known, last_used = [0.0] * CELLS, NOW, dict[int, float](), dict[int, float]()
    for session, wait in steps:
        wall += wait
        number, offset, evicted = find_entry(cells, 0, "key a", f"s{session}", wall)
        assert not evicted, "so few sessions fit into their sets"
        if wall - last_used.get(session, 0.0) >= IDLE:
            known.pop(session, None)
        assert (cells[offset], cells[offset + 1]) == (number, known.get(session, 0.0))
        cells[offset + 1] += 1
        known[session], last_used[session] = cells[offset + 1], wall


def test_a_request_whose_session_was_evicted_changes_no_other_session() -> None:
    buckets, at = Buckets.private(), moment(1000.0, NOW)
    first, _ = buckets.session("key a", BUDGET, "first", NOW)
    reserved = [(first, Amounts(1, 1, 60))]
    assert buckets.reserve(reserved, at, {}) is None
    (window,), number = first.windows, 1 << 41
    offset = window.start
    buckets.cells[offset], buckets.cells[offset + 1] = number, 33.0  # another session has the entry now
    buckets.settle(reserved, {}, Amounts(1, 0, 90), at, 1001.0)
    assert buckets.reserve(reserved, at, {}) is None
    assert (buckets.cells[offset], buckets.cells[offset + 1]) == (number, 33.0)
    assert window.number != number


_STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 120), st.integers(0, 130)), max_size=12)


def test_the_store_counts_sessions_as_the_memory_does() -> None:
    with redis_server() as server:

        @asynccontextmanager
        async def opened() -> AsyncIterator[RedisStore]:
            store = RedisStore(server.store_config(), "a worker", lambda _: None)
            try:
                yield store
            finally:
                store.close()

        async def compare(steps: list[tuple[int, int, int]]) -> None:
            buckets = Buckets.private()
            async with opened() as store:
                for step, (session, tokens, used) in enumerate(steps):
                    holder, _ = buckets.session("key a", BUDGET, f"s{session}", NOW)
                    wanted = [(holder, Amounts(1, 1, tokens))]
                    expected, result = buckets.reserve(wanted, moment(0.0, NOW), {}), await store.admit(str(step), wanted)
                    assert result.exceeded == expected
                    assert [state for _, state in result.budgets] == buckets.budget_states(holder, moment(0.0, NOW))
                    if expected is None:
                        buckets.settle(wanted, {}, Amounts(1, 0, used), moment(0.0, NOW), 0.0)
                        store.settle(str(step), wanted, Amounts(1, 0, used))

        @settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(_STEPS)
        def check(steps: list[tuple[int, int, int]]) -> None:
            with server.client() as each:
                each.flushall()
            asyncio.run(compare(steps))

        check()


async def test_the_store_forgets_the_session_that_was_used_least_recently() -> None:
    with redis_server() as server, server.client() as each:
        store = RedisStore(server.store_config(), "a worker", lambda _: None)
        holder, _ = Buckets.private().session("key a", BUDGET, "new", NOW)
        each.zadd(
            "vllm-gateway:key a sessions", {f"vllm-gateway:key a session s{number}": time() - 5000 + number for number in range(1024)}
        )
        each.hset("vllm-gateway:key a session s0", mapping={"s": 1, "st": 99})
        try:
            result = await store.admit("r1", [(holder, Amounts(1, 1, 7))])
            assert (result.exceeded, result.evicted) == (None, 1)
            assert each.zcard("vllm-gateway:key a sessions") == 1024
            assert not each.exists("vllm-gateway:key a session s0") and each.exists("vllm-gateway:key a session new")
            assert 86_000 < each.ttl("vllm-gateway:key a sessions") <= 86_400
            assert (await store.admit("r2", [(holder, Amounts(1, 1, 7))])).evicted == 0, "this session is known"
        finally:
            store.close()


# As clients see them


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


@asynccontextmanager
async def limited(*more: Allowance, **limits: Any) -> AsyncIterator[Served]:
    one = key(allowances=(Allowance("key team-a", Limits(**limits)), *more))
    async with scripted(respond) as server, serving([model(server.port)], [one]) as served:
        yield served


async def send(served: Served, session: str | None, **fields: Any) -> Reply:
    extra = () if session is None else (f"x-session-id: {session}",)
    return await request_once(served.port, request(chat(max_tokens=1, **fields), extra=extra))


async def test_a_session_is_stopped_at_its_budget() -> None:
    async with limited(session=BUDGET) as served:
        replies = [await send(served, "run-1") for _ in range(30)]
        admitted = [reply for reply in replies if reply.status == 200]
        remaining = [int(reply.headers["x-ratelimit-remaining-tokens-session"]) for reply in admitted]
        assert remaining == [100 - USED * number for number in range(1, len(admitted) + 1)]
        warned = [reply.headers.get("x-vllm-gateway-budget-warning", "") for reply in admitted]
        assert [bool(text) for text in warned] == [left <= 20 for left in remaining] and any(warned)
        refused = replies[-1]
        assert (refused.status, refused.error["code"], refused.headers["x-should-retry"]) == (429, "insufficient_quota", "false")
        assert "retry-after" not in refused.headers and "x-ratelimit-reset-tokens-session" not in refused.headers
        left = remaining[-1]
        assert f"of the limit of 100 tokens per session only {left} are left (key team-a session run-1). Start a new session." in str(
            refused.error["message"]
        )
        assert served.value("limited_total", "team-a", "tokens_per_session") == len(replies) - len(admitted)
        assert (await send(served, "run-2")).status == 200
        assert (await send(served, None)).status == 200
        assert (await send(served, None, metadata={"session_id": "run-1"})).status == 429


async def test_large_bodies_and_forms_have_sessions_too() -> None:
    boundary = "--b\r\ncontent-disposition: form-data; name="
    form = f'{boundary}"model"\r\n\r\ntiny\r\n{boundary}"file"; filename="a"\r\n\r\nsound\r\n--b--\r\n'.encode()
    async with limited(session=Budget("session", tokens=1_000_000)) as served:
        large = await send(served, None, metadata={"session_id": "run-1"}, messages=[{"role": "user", "content": "a" * 300_000}])
        assert large.headers["x-ratelimit-remaining-tokens-session"] == str(1_000_000 - USED)
        sent = request(form, "/v1/audio/transcriptions", extra=("x-session-id: run-1",))
        reply = await request_once(served.port, sent.replace(b"application/json", b"multipart/form-data; boundary=b"))
        assert int(reply.headers["x-ratelimit-remaining-tokens-session"]) < 1_000_000 - USED


async def test_sessions_that_a_store_forgets_are_counted() -> None:
    one = key(allowances=(Allowance("key team-a", Limits(session=BUDGET)),))
    with redis_server() as store, store.client() as each:
        each.zadd("vllm-gateway:key team-a sessions", {f"vllm-gateway:key team-a session s{number}": time() for number in range(1024)})
        async with scripted(respond) as server, serving([model(server.port)], [one], limits_store=store.store_config()) as served:
            assert (await send(served, "run-1")).status == 200
            assert served.value("session_evictions_total", "team-a") == 1


async def test_sessions_that_are_forgotten_are_counted() -> None:
    async with limited(session=BUDGET) as served:
        limiter, one = served.context.limiter, served.worker.snapshot.keys[0]
        limits = KeyLimits(one.id, limiter.buckets, one.allowances)
        assert served.value("session_evictions_total", "team-a") == 0
        for number in range(2 * SETS_OF_HOLDER * WAYS):
            limiter.session_holders(limits, f"s{number}")
        assert SETS_OF_HOLDER * WAYS <= served.value("session_evictions_total", "team-a") < 2 * SETS_OF_HOLDER * WAYS


async def test_without_space_for_the_table_a_session_is_refused() -> None:
    memory = mmap.mmap(-1, 1 << 14)
    struct.pack_into("<QQ", memory, 0, 1, 0)
    one = key(allowances=(Allowance("key team-a", Limits(session=BUDGET)),))
    with shared_counters() as counts:
        limiter = Limiter(WorkerMetrics(counts), Buckets(memory), lambda _: None)
        limiter.apply_snapshot(Snapshot(1, (one,), ()))
        reservation = reservation_of(limiter, one, "req_1", {b"x-session-id": b"run-1"})
        with pytest.raises(Refusal) as refused:
            estimate_request(reservation, chat(), "/v1/chat/completions", 2, InlineMedia(), Model("tiny", ()))
    assert refused.value.code == "overloaded"


async def test_the_sessions_of_a_team_and_the_budgets_of_its_key_count_together() -> None:
    team = Allowance("team lab", Limits(session=Budget("session", tokens=60)))
    async with limited(team, session=BUDGET, tokens_per_day=1000) as served:
        replies = [await send(served, "run") for _ in range(15)]
        refused = next(reply for reply in replies if reply.status == 429)
        assert "tokens per session" in str(refused.error["message"]) and "(team lab session run)" in str(refused.error["message"])
        admitted = sum(reply.status == 200 for reply in replies)
        assert int(refused.headers["x-ratelimit-remaining-tokens-day"]) == 1000 - admitted * USED


@pytest.mark.parametrize("in_store", [False, True], ids=["in memory", "in a store"])
def test_all_workers_count_a_session_together(tmp_path: Path, in_store: bool) -> None:
    limits = {"session": {"tokens": 200}, "tokens_per_month": 10**6}
    config = configuration(launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 0}), workers=2)
    config["keys"] = [{"id": "team-a", "hash": keys.hash_of(KEY), "limits": limits}]
    with redis_server() as redis:
        if in_store:
            config["limits_store"] = redis.url
        with gateway(tmp_path, config) as one:
            used = 0
            for _ in range(60):
                response = one.request(model="m", max_tokens=4, metadata={"session_id": "run"})
                if response.status_code == 429:
                    break
                used += response.json()["usage"]["total_tokens"]
            assert response.status_code == 429 and "tokens per session" in response.json()["error"]["message"]
            assert 150 < used <= 200 == int(response.headers["x-ratelimit-limit-tokens-session"])
            assert int(response.headers["x-ratelimit-remaining-tokens-session"]) == 200 - used
            assert one.request(model="m", max_tokens=4, metadata={"session_id": "next"}).status_code == 200
