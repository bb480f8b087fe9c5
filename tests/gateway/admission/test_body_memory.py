"""Large bodies reserve memory from one limit, and release it however their request ends."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.body_memory import FREE, BodyMemory
from gateway.client.connection import ClientConnection
from gateway.client.request import ClientRequest
from gateway.snapshot.snapshot import Clients
from tests.gateway.proxy.test_form import MODEL, form, part
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.way import way
from tests.support.wire import COMPLETION, Client, chat, client, request, request_once

LARGE = request(chat(user="u" * 300_000))
HEAD, _, BODY = LARGE.partition(b"\r\n\r\n")
CHUNKED = HEAD.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked") + b"\r\n\r\n"
EXPECT_CONTINUE = HEAD + b"\r\nexpect: 100-continue\r\n\r\n"
CAPACITY = 500_000
"""Memory for one large body, but not for two."""


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


def serving_with_little_memory(*ports: int, capacity: int = CAPACITY) -> Any:
    return serving([model(*ports)], clients=Clients(body_memory=capacity))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["new", "more", "give"]), st.integers(0, 300)), max_size=60))
def test_memory_stays_within_the_limit_and_is_all_released(steps: list[tuple[str, str, int]]) -> None:
    memory, bodies = BodyMemory(1000), list[tuple[str, int]]()
    for holder, step, size in steps:
        own = next((number for number, (whose, _) in enumerate(bodies) if whose == holder), None)
        if step == "new" and memory.reserve(size, holder):
            bodies.append((holder, size))
        elif step == "more" and own is not None and memory.reserve(size, holder, more=True):
            bodies[own] = (holder, bodies[own][1] + size)
        elif step == "give" and own is not None:
            memory.release(bodies[own][1], holder)
            del bodies[own]
        assert memory.held == sum(size for _, size in bodies) <= memory.limit
    for holder, size in bodies:
        memory.release(size, holder)
    assert memory.held == 0 and memory.reserve(1000, "a")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=60))
def test_one_key_always_leaves_memory_for_others(steps: list[tuple[bool, int]]) -> None:
    memory, bodies = BodyMemory(1000), 0
    for more, size in steps:
        if more and bodies:
            memory.reserve(size, "greedy", more=True)
        else:
            bodies += memory.reserve(size, "greedy")
        if bodies > 1:
            quarter = memory.held // 4
            assert memory.reserve(quarter, "another")
            memory.release(quarter, "another")


def test_a_single_body_may_use_all_of_the_memory() -> None:
    memory = BodyMemory(1000)
    assert memory.reserve(500, "a") and memory.reserve(500, "a", more=True)
    assert not memory.reserve(1, "b")


def test_a_copy_leaves_half_of_the_memory_free() -> None:
    memory = BodyMemory(1000)
    assert not memory.reserve_spare(501, "copy")
    assert memory.reserve(300, "key") and memory.reserve_spare(200, "copy") and not memory.reserve_spare(1, "copy")
    memory.release(200, "copy")
    assert memory.held == 300


async def test_a_key_with_many_bodies_leaves_memory_for_another_key() -> None:
    greedy = HEAD.replace(KEY.encode(), b"sk-greedy")
    assert greedy != HEAD
    async with serving([model(1)], [key(), key("greedy", "sk-greedy")], clients=Clients(body_memory=10 * len(BODY))) as served:
        async with AsyncExitStack() as stack:
            for _ in range(12):
                one = await stack.enter_async_context(client(served.port))
                one.send(greedy + b"\r\n\r\n" + BODY[:-1])
                await until(lambda: all(_has_received(each) for each in served.connections))
            assert served.context.memory.held == 8 * len(BODY)
            assert (await request_once(served.port, LARGE)).status == 502, "it was read, and went on to a server that is not there"
        await until(lambda: served.context.memory.held == 0)


def _has_received(connection: ClientConnection) -> bool:
    """Return whether a connection has received all but one byte of its body, or has refused it."""
    request = connection.current
    return isinstance(request, ClientRequest) and (request.body.dropped or request.body.size == len(BODY) - 1)


async def test_only_bytes_that_have_arrived_take_memory() -> None:
    async with serving([model(1)], clients=Clients(body_memory=3 * len(BODY))) as served, AsyncExitStack() as stack:
        for number in range(20):
            (await stack.enter_async_context(client(served.port))).send(HEAD + b"\r\n\r\nx")
            await until(lambda number=number: len(served.connections) == served.in_flight == number + 1)
        assert served.context.memory.held == 0
        assert (await request_once(served.port, LARGE)).status == 502, "it was read, and went on to a server that is not there"


@pytest.mark.parametrize("begin", [HEAD + b"\r\n\r\n" + BODY[:100_000], CHUNKED + b"%x\r\n" % len(BODY) + BODY[:100_000], EXPECT_CONTINUE])
async def test_a_body_beyond_the_limit_is_refused(begin: bytes) -> None:
    async with scripted(respond) as server, serving_with_little_memory(server.port) as served, client(served.port) as first:
        first.send(LARGE[:-10])
        await until(lambda: served.context.memory.held == len(BODY))
        async with client(served.port) as second:
            second.send(begin)
            if begin.startswith(CHUNKED):
                second.send(BODY[100_000:] + b"\r\n0\r\n\r\n")
            reply = await second.reply()
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
            assert reply.headers["connection"] == "close" or begin.startswith(CHUNKED)
        assert served.context.memory.held == len(BODY)
        assert (await request_once(served.port, request())).status == 200, "small ones are not counted"
        first.send(LARGE[-10:])
        assert (await first.reply()).status == 200
        await until(lambda: served.context.memory.held == 0)
        assert (await request_once(served.port, LARGE)).status == 200
        assert served.value("requests_total", "other", "/v1/chat/completions", "503") == 1


async def _all_released(served: Served) -> None:
    await until(lambda: served.in_flight == 0 and served.context.memory.held == 0)


async def test_memory_is_released_however_a_request_ends() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await respond(talk)

    async with scripted(script) as server, serving_with_little_memory(server.port) as served:
        async with client(served.port) as aborting:
            aborting.send(LARGE)
            await until(lambda: server.requests)
            assert served.context.memory.held > 0, "until its end: it may have to be sent again"
        await _all_released(served)
        async with client(served.port) as aborting:
            aborting.send(LARGE[:-10])
            await until(lambda: served.context.memory.held > 0)
        await _all_released(served)
        release.set()
        for refused in (request(b"[" + b"1," * 100_000), request(b"x" * 200_000), request(chat(model="no", user="u" * 200_000))):
            assert (await request_once(served.port, refused)).status in (400, 404)
            await _all_released(served)
        assert (await request_once(served.port, LARGE)).status == 200
        await _all_released(served)


async def test_pipelined_bodies_are_counted_and_released() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await respond(talk)

    async with scripted(script) as server, serving_with_little_memory(server.port) as served, client(served.port) as one:
        one.send(request() + LARGE + LARGE)
        await until(lambda: server.requests and next(iter(served.connections)).flow.reading_held)
        stored = len(next(iter(served.connections)).parser.stored)
        assert (stored if stored > FREE else 0) <= served.context.memory.held < stored + FREE, "they belong to the key of the request"
        release.set()
        assert [(await one.reply()).status for _ in range(3)] == [200, 200, 200], "each body is received in its turn"
        release.clear()
        one.send(request() + LARGE)
        await until(lambda: len(server.requests) == 4)
        one.disconnect()
        await _all_released(served)


async def test_bytes_behind_a_request_without_memory_for_them_are_dropped() -> None:
    """The connection is closed after the response, so the client sends the other requests again (RFC 9112, section 9.3.2)."""
    with way() as one:
        one.context.memory.limit = 100_000
        one.client.data_received(request() + LARGE)
        one.write_batch.flush()
        assert one.context.memory.held == 0 and not one.client.parser.stored
        one.server_wire.receive(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        one.write_batch.flush()
        sent = one.client_wire.take()
        assert sent.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in sent


async def test_what_one_key_can_hold_is_bounded() -> None:
    """Whatever a key pipelines on many connections: ``FREE`` bytes for each connection are free, and all others are reserved."""
    release, connections = asyncio.Event(), 40

    async def script(talk: Conversation) -> None:
        await release.wait()
        await respond(talk)

    async with scripted(script) as server, serving_with_little_memory(server.port, capacity=1 << 20) as served, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(served.port)) for _ in range(connections)]
        for each in clients:
            each.send(request() + LARGE * 3)
        await until(lambda: len(served.connections) == connections and all(each.flow.reading_held for each in served.connections))
        stored = [len(each.parser.stored) for each in served.connections]
        assert sum(size for size in stored if size > FREE) <= served.context.memory.held <= 1 << 20
        assert 0 in stored, "what has no memory is dropped"
        release.set()
        assert [(await each.reply()).status for each in clients] == [200] * connections
        for each in clients:
            each.disconnect()
        await _all_released(served)


# Forms

BIG = part("file", b"x" * 300_000)


async def _status(one: Client) -> int:
    return (await one.reply()).status


async def test_only_the_stored_part_of_a_form_is_counted() -> None:
    """The part before the `model` field is stored. The part after it is forwarded as it arrives."""
    async with scripted(respond) as server, serving_with_little_memory(server.port, capacity=700_000) as served, AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(client(served.port)) for _ in range(3)]
        first.send(form(BIG, MODEL)[:-200])
        await until(lambda: served.context.memory.held > 250_000)
        second.send(form(BIG, BIG, MODEL))
        assert await _status(second) == 503
        third.send(form(MODEL, BIG, BIG, BIG))
        assert await _status(third) == 200
        first.send(form(BIG, MODEL)[-200:])
        assert await _status(first) == 200
        await _all_released(served)
        assert [len(seen.body) > 600_000 for seen in server.requests] == [True, False]


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes(size: int) -> None:
    """Only the buffer, which grows by an eighth, and the bytes of the last read are in memory."""
    payload = 1_000_000
    read = b"".join([b"%x\r\n%b\r\n" % (size, b"x" * size)] * (20_000 // size))
    with way() as one:
        one.client.data_received(CHUNKED)
        tracemalloc.start()
        try:
            for _ in range(payload // 20_000):
                one.client.data_received(read)
                await until(lambda: not one.client.flow.reading_held)  # the chunks of a read are decoded in several iterations
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert one.context.memory.held >= payload
        assert held < 1.2 * payload + 100_000 and peak < 3 * payload
