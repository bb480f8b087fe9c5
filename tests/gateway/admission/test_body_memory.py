"""Large bodies take their share of one number, and give it back however their request ends."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.body_memory import FREE, BodyMemory
from gateway.snapshot.snapshot import Clients
from tests.gateway.proxy.test_form import MODEL, form, part
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.way import way
from tests.support.wire import COMPLETION, Client, ask, chat, client, request

LARGE = request(chat(user="u" * 300_000))
HEAD, _, BODY = LARGE.partition(b"\r\n\r\n")
CHUNKED = HEAD.replace(b"content-length: %d" % len(BODY), b"transfer-encoding: chunked") + b"\r\n\r\n"
EXPECTANT = HEAD + b"\r\nexpect: 100-continue\r\n\r\n"
ROOM = 500_000
"""For one of these and not for two."""


async def answers(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


def serving_in_little(*ports: int, room: int = ROOM) -> Any:
    return serving([model(*ports)], clients=Clients(body_memory=room))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["new", "more", "give"]), st.integers(0, 300)), max_size=60))
def test_never_more_than_the_limit_and_all_given_back(steps: list[tuple[str, str, int]]) -> None:
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
def test_whatever_one_key_does_others_find_room(steps: list[tuple[bool, int]]) -> None:
    memory, bodies = BodyMemory(1000), 0
    for more, size in steps:
        if more and bodies:
            memory.reserve(size, "greedy", more=True)
        else:
            bodies += memory.reserve(size, "greedy")
        if bodies > 1:
            room = memory.held // 4
            assert memory.reserve(room, "another")
            memory.release(room, "another")


def test_a_key_that_has_one_body_may_have_all_of_it() -> None:
    memory = BodyMemory(1000)
    assert memory.reserve(500, "a") and memory.reserve(500, "a", more=True)
    assert not memory.reserve(1, "b")


async def test_one_key_that_holds_many_bodies_leaves_room_for_anothers() -> None:
    greedy = HEAD.replace(KEY.encode(), b"sk-greedy")
    assert greedy != HEAD
    async with serving([model(1)], [key(), key("greedy", "sk-greedy")], clients=Clients(body_memory=10 * len(BODY))) as served:
        async with AsyncExitStack() as stack:
            for _ in range(12):
                (await stack.enter_async_context(client(served.port))).send(greedy + b"\r\n\r\nx")
            await until(lambda: served.context.memory.held == 8 * len(BODY))
            assert (await ask(served.port, LARGE)).status == 502, "it was read, and went on to a server that is not there"
        await until(lambda: served.context.memory.held == 0)


@pytest.mark.parametrize("begin", [HEAD + b"\r\n\r\n" + BODY[:100_000], CHUNKED + b"%x\r\n" % len(BODY) + BODY[:100_000], EXPECTANT])
async def test_beyond_it_a_body_is_refused(begin: bytes) -> None:
    async with scripted(answers) as server, serving_in_little(server.port) as served, client(served.port) as first:
        first.send(LARGE[:-10])
        await until(lambda: served.context.memory.held > FREE)
        held = served.context.memory.held
        async with client(served.port) as second:
            second.send(begin)
            if begin.startswith(CHUNKED):
                second.send(BODY[100_000:] + b"\r\n0\r\n\r\n")
            reply = await second.reply()
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
            assert reply.headers["connection"] == "close" or begin.startswith(CHUNKED)
        assert served.context.memory.held == held
        assert (await ask(served.port, request())).status == 200, "small ones are not counted"
        first.send(LARGE[-10:])
        assert (await first.reply()).status == 200
        await until(lambda: served.context.memory.held == 0)
        assert (await ask(served.port, LARGE)).status == 200
        assert served.value("requests_total", "other", "/v1/chat/completions", "503") == 1


async def _gone(served: Served) -> None:
    await until(lambda: served.in_flight == 0 and served.context.memory.held == 0)


async def test_it_is_given_back_however_a_request_ends() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await answers(talk)

    async with scripted(script) as server, serving_in_little(server.port) as served:
        async with client(served.port) as leaves:
            leaves.send(LARGE)
            await until(lambda: server.requests)
            assert served.context.memory.held > 0, "until its end: it may have to be sent again"
        await _gone(served)
        async with client(served.port) as leaves:
            leaves.send(LARGE[:-10])
            await until(lambda: served.context.memory.held > 0)
        await _gone(served)
        release.set()
        for refused in (request(b"[" + b"1," * 100_000), request(b"x" * 200_000), request(chat(model="no", user="u" * 200_000))):
            assert (await ask(served.port, refused)).status in (400, 404)
            await _gone(served)
        assert (await ask(served.port, LARGE)).status == 200
        await _gone(served)


async def test_bodies_that_wait_for_their_turn_are_counted_and_given_back() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await answers(talk)

    async with scripted(script) as server, serving_in_little(server.port) as served, client(served.port) as one:
        one.send(request() + LARGE + LARGE)
        await until(lambda: server.requests and served.context.memory.held > 0)
        waiting = next(iter(served.connections)).pipeline
        await until(lambda: len(waiting) == 2)  # the last one has come while there was no room for it
        release.set()
        assert [(await one.reply()).status for _ in range(3)] == [200, 200, 503]
        release.clear()
        one.send(request() + LARGE)
        await until(lambda: served.context.memory.held > 0)
        one.leave()
        await _gone(served)


async def test_what_is_sent_ahead_without_a_key_is_not_kept() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await answers(talk)

    strange = LARGE.replace(b"Bearer sk-", b"Bearer sk-not-")
    async with scripted(script) as server, serving_in_little(server.port) as served, client(served.port) as one:
        one.send(request() + strange * 5 + request())
        await until(lambda: server.requests)
        waiting = next(iter(served.connections)).pipeline
        await until(lambda: len(waiting) == 6 and waiting[-1].body.complete)
        assert served.context.memory.held == 0 and sum(call.body.size for call in waiting) == len(request().partition(b"\r\n\r\n")[2])
        release.set()
        assert [(await one.reply()).status for _ in range(7)] == [200, 401, 401, 401, 401, 401, 200]


# Forms

BIG = part("file", b"x" * 300_000)


async def _status(one: Client) -> int:
    return (await one.reply()).status


async def test_a_form_is_counted_as_far_as_it_is_held() -> None:
    """What comes before its model is held; what comes behind goes to the server as it comes."""
    async with scripted(answers) as server, serving_in_little(server.port, room=700_000) as served, AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(client(served.port)) for _ in range(3)]
        first.send(form(BIG, MODEL)[:-200])
        await until(lambda: served.context.memory.held > 250_000)
        second.send(form(BIG, BIG, MODEL))
        assert await _status(second) == 503
        third.send(form(MODEL, BIG, BIG, BIG))
        assert await _status(third) == 200
        first.send(form(BIG, MODEL)[-200:])
        assert await _status(first) == 200
        await _gone(served)
        assert [len(seen.body) > 600_000 for seen in server.requests] == [True, False]


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes(size: int) -> None:
    """Beside the buffer, which grows by an eighth, there are only the bytes of the last read."""
    payload = 1_000_000
    read = b"".join([b"%x\r\n%b\r\n" % (size, b"x" * size)] * (20_000 // size))
    with way() as one:
        one.client.data_received(CHUNKED)
        tracemalloc.start()
        try:
            for _ in range(payload // 20_000):
                one.client.data_received(read)
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert one.context.memory.held >= payload
        assert held < 1.2 * payload + 100_000 and peak < 3 * payload
