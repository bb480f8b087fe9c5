"""Side requests are bounded in number and time, and are no part of their server's load or failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.ports import refusing
from tests.support.running import until
from tests.support.scripted import Conversation, Scripted, scripted
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.balancing.side_requests import AT_ONCE, SideRequests
from upstream.http.address import Address
from upstream.http.deadlines import Deadlines
from upstream.http.errors import ConnectFailed, TotalTimeout, UpstreamError

LONG = 60.0  # seconds, which no test waits for


def server_at(port: int) -> Server:
    return Server(ServerSpec("one", Address(port=port), "tiny", api_key="key"), Condition.UP)


@asynccontextmanager
async def responding(status: str = "200 OK", body: bytes = b'{"count":3}') -> AsyncIterator[Scripted]:
    async def script(talk: Conversation) -> None:
        await talk.respond(body, status)

    async with scripted(script) as running:
        yield running


async def test_a_response_is_returned_and_its_connection_is_used_again() -> None:
    deadlines = Deadlines()
    side = SideRequests(deadlines)
    async with responding() as running:
        one = server_at(running.port)
        for _ in range(3):
            assert await side.post(one, "/tokenize", b"{}", LONG) == (200, b'{"count":3}')
        assert running.accepted == 1 and one.in_flight == 0 and not one.recently_failed and len(deadlines) == 0
        request = running.requests[0]
        assert request.head.startswith(b"POST /tokenize HTTP/1.1\r\n") and request.body == b"{}"
        assert request.header("authorization") == "Bearer key" and request.header("content-type") == "application/json"
        one.retire()


async def test_a_stale_connection_is_replaced() -> None:
    side = SideRequests(Deadlines())
    async with responding() as running:
        one = server_at(running.port)
        await side.post(one, "/tokenize", b"{}", LONG)
        running.hang_up()
        assert (await side.post(one, "/tokenize", b"{}", LONG))[0] == 200
        assert running.accepted == 2
        one.retire()


@pytest.mark.parametrize("status", ["403 Forbidden", "404 Not Found"])
async def test_a_refused_path_is_remembered_for_its_server(status: str) -> None:
    side = SideRequests(Deadlines())
    async with responding(status) as running:
        one, other = server_at(running.port), server_at(running.port)
        assert side.may_serve(one, "/v1/responses/render")
        await side.post(one, "/v1/responses/render", b"{}", LONG)
        assert not side.may_serve(one, "/v1/responses/render")
        assert side.may_serve(one, "/tokenize") and side.may_serve(other, "/v1/responses/render")
        one.retire()


async def test_an_error_of_one_request_is_not_remembered() -> None:
    side = SideRequests(Deadlines())
    async with responding("400 Bad Request") as running:
        one = server_at(running.port)
        assert (await side.post(one, "/tokenize", b"{}", LONG))[0] == 400 and side.may_serve(one, "/tokenize")
        one.retire()


async def test_more_requests_wait_and_expire() -> None:
    arrived, release = [0], asyncio.Event()

    async def script(talk: Conversation) -> None:
        arrived[0] += 1
        await release.wait()
        await talk.respond(b"{}")

    deadlines = Deadlines()
    side = SideRequests(deadlines)
    async with scripted(script) as running:
        one = server_at(running.port)
        waiting = [asyncio.create_task(side.post(one, "/tokenize", b"{}", LONG)) for _ in range(AT_ONCE)]
        late = asyncio.create_task(side.post(one, "/tokenize", b"{}", 0.0))
        await until(lambda: arrived[0] == AT_ONCE)
        assert not late.done()
        release.set()
        assert await asyncio.gather(*waiting) == [(200, b"{}")] * AT_ONCE
        with pytest.raises(TotalTimeout):
            await late
        assert arrived[0] == AT_ONCE and len(deadlines) == 0
        one.retire()


async def test_a_silent_server_ends_at_the_deadline_without_a_failure() -> None:
    async def script(talk: Conversation) -> None:
        await talk.closed_by_peer()

    deadlines = Deadlines()
    side = SideRequests(deadlines)
    async with scripted(script) as running:
        one = server_at(running.port)
        posted = asyncio.create_task(side.post(one, "/tokenize", b"{}", 0.01))
        while not posted.done():
            deadlines.tick()
            await asyncio.sleep(0.002)
        with pytest.raises(UpstreamError):
            await posted
        assert not one.recently_failed and len(deadlines) == 0
        await until(lambda: running.open == 0)


async def test_a_cancelled_request_leaves_nothing() -> None:
    arrived = asyncio.Event()

    async def script(talk: Conversation) -> None:
        arrived.set()
        await talk.closed_by_peer()

    deadlines = Deadlines()
    side = SideRequests(deadlines)
    async with scripted(script) as running:
        posted = asyncio.create_task(side.post(server_at(running.port), "/tokenize", b"{}", LONG))
        await arrived.wait()
        posted.cancel()
        await asyncio.gather(posted, return_exceptions=True)
        await until(lambda: running.open == 0)
        assert posted.cancelled() and len(deadlines) == 0


async def test_a_server_that_cannot_be_reached_is_no_failure() -> None:
    with refusing() as port:
        one = server_at(port)
        with pytest.raises(ConnectFailed):
            await SideRequests(Deadlines()).post(one, "/tokenize", b"{}", LONG)
        assert not one.recently_failed
