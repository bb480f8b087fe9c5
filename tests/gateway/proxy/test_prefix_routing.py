"""``balance: prefix`` from a client's request to the server that gets it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from tests.support.running import KEY, Served, model, serving
from tests.support.scripted import Conversation, scripted


@pytest.fixture
async def worker() -> AsyncIterator[Served]:
    """Three servers, each of which answers with its number."""

    def numbered(number: int) -> Any:
        async def script(talk: Conversation) -> None:
            await talk.respond(b'{"number": %d}' % number)

        return script

    async with AsyncExitStack() as stack:
        ports = [(await stack.enter_async_context(scripted(numbered(number)))).port for number in range(3)]
        yield await stack.enter_async_context(serving([model(*ports, balance="prefix")]))


async def server_of(worker: Served, session: str = "", path: str = "/v1/chat/completions", **body: Any) -> int:
    headers = {"authorization": f"Bearer {KEY}"} | ({"x-session-id": session} if session else {})
    async with httpx2.AsyncClient() as client:
        response = await client.post(worker.url + path, json={"model": "tiny", **body}, headers=headers)
    number: int = response.json()["number"]
    return number


async def test_the_turns_of_a_conversation_reach_one_server(worker: Served) -> None:
    used = set()
    for number in range(12):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": f"conversation {number}"}]
        more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        servers = {await server_of(worker, messages=messages + more * length) for length in range(3)}
        assert len(servers) == 1
        used |= servers
    assert len(used) > 1
    assert worker.in_flight == 0


async def test_a_header_groups_requests(worker: Served) -> None:
    def request_body(number: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"{number}"}]}

    assert len({await server_of(worker, f"session {number}", **request_body(1)) for number in range(12)}) > 1
    assert len({await server_of(worker, "one", **request_body(number)) for number in range(12)}) == 1


async def test_extra_body_counts_as_what_is_sent(worker: Served) -> None:
    servers = {await server_of(worker, path="/v1/completions", prompt=f"{n}", extra_body={"prompt": "the same"}) for n in range(8)}
    assert len(servers) == 1
