"""Token IDs from a server that responds, fails, is too slow or closes an idle connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.ports import refusing
from tests.support.running import until
from tests.support.scripted import Conversation, Script, Scripted, scripted
from upstream.balancing.server import Server, ServerSpec
from upstream.balancing.side_requests import AT_ONCE, SideRequests
from upstream.http.address import Address
from upstream.http.deadlines import Deadlines
from upstream.vllm.tokenize import WAITING, Tokenization


class Client:
    """A server, and what requests its token IDs."""

    def __init__(self, port: int, timeout: float = 30.0, stored_tokens: int = 1000) -> None:
        self.server = Server(ServerSpec("server", Address(port=port), "model"))
        self.deadlines = Deadlines()
        self.tokenization = Tokenization(SideRequests(self.deadlines), timeout, stored_tokens)

    async def ids(self, body: bytes = b"{}") -> list[int] | None:
        found = await self.tokenization.token_ids(self.server, body)
        assert len(self.deadlines) == 0 or found is None
        return None if found is None else list(found)


@asynccontextmanager
async def requesting(script: Script, timeout: float = 30.0, stored_tokens: int = 1000) -> AsyncIterator[tuple[Client, Scripted]]:
    async with scripted(script) as running:
        one = Client(running.port, timeout, stored_tokens)
        try:
            yield one, running
        finally:
            one.server.retire()


async def respond(conversation: Conversation) -> None:
    await conversation.respond(b'{"count": 3, "max_model_len": 9, "tokens": [1, 2, 4294967295]}')


async def test_ids_are_requested_once_for_each_body() -> None:
    async with requesting(respond) as (one, server):
        for body in (b"{}", b"{}", b'{"prompt": "a"}'):
            assert await one.ids(body) == [1, 2, 2**32 - 1]
        assert [request.body for request in server.requests] == [b"{}", b'{"prompt": "a"}']
        assert server.requests[0].head.startswith(b"POST /tokenize HTTP/1.1\r\n")
        assert server.accepted == 1


async def test_equal_prompts_at_once_are_stored_once() -> None:
    async with requesting(respond, stored_tokens=150) as (one, server):
        found = await asyncio.gather(*(one.tokenization.token_ids(one.server, b"same") for _ in range(3)))
        assert [list(ids or ()) for ids in found] == [[1, 2, 2**32 - 1]] * 3
        await one.ids(b"other")
        assert await one.ids(b"same") == [1, 2, 2**32 - 1]
        assert [request.body for request in server.requests] == [b"same"] * 3 + [b"other"]


async def test_the_memory_of_earlier_prompts_is_bounded() -> None:
    async with requesting(respond, stored_tokens=150) as (one, server):
        for number in (0, 1, 2, 0):
            await one.ids(b"%d" % number)
        assert len(server.requests) == 4


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tokens": "a"}', b'{"tokens": [-1]}', b'{"tokens": [4294967296]}'])
async def test_another_response_gives_none(body: bytes) -> None:
    async with requesting(lambda conversation: conversation.respond(body)) as (one, _):
        assert await one.ids() is None


async def test_an_error_gives_none() -> None:
    async with requesting(lambda conversation: conversation.respond(b'{"tokens": [1]}', status="404 Not Found")) as (one, server):
        assert await one.ids() is None
        assert await one.ids() is None
        assert len(server.requests) == 1
    with refusing() as port:
        assert await Client(port).ids() is None


async def test_a_slow_server_gives_none_and_loses_its_connection() -> None:
    async with requesting(Conversation.closed_by_peer, timeout=0.1) as (one, server):
        waiting = asyncio.ensure_future(one.ids())
        await until(lambda: server.requests)

        def ticked() -> bool:
            one.deadlines.tick()
            return waiting.done()

        await until(ticked)
        assert await waiting is None
        await until(lambda: server.open == 0)


async def test_a_closed_idle_connection_is_replaced() -> None:
    async with requesting(respond) as (one, server):
        await one.ids(b"1")
        assert server.accepted == 1
        server.hang_up()
        assert await one.ids(b"2") == [1, 2, 2**32 - 1]
        assert server.accepted == 2


async def test_after_several_failures_nothing_is_requested_for_a_while() -> None:
    async with requesting(lambda conversation: conversation.respond(b"", status="500 Error")) as (one, server):
        for number in range(8):
            assert await one.ids(b"%d" % number) is None
        assert len(server.requests) == 5


async def test_waiting_requests_are_bounded_and_can_be_cancelled() -> None:
    async with requesting(Conversation.closed_by_peer) as (one, server):
        waiting = [asyncio.ensure_future(one.ids(b"%d" % number)) for number in range(WAITING)]
        await until(lambda: len(server.requests) == AT_ONCE)
        assert await one.ids(b"one more") is None
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: server.open == 0)
        assert len(one.deadlines) == 0
