"""The gateway's own time excludes the time of the server, however the request ends."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.running import model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, chat, client, request

PAUSE = 0.5


async def responses(talk: Conversation) -> None:
    await asyncio.sleep(PAUSE)
    await talk.respond(COMPLETION)


async def refuses(talk: Conversation) -> None:
    await asyncio.sleep(PAUSE)
    await talk.respond(b"{}", "500 Internal Server Error")


async def waits(talk: Conversation) -> None:
    await talk.closed_by_peer()


async def closes(talk: Conversation) -> None:
    await asyncio.sleep(PAUSE)
    talk.writer.transport.abort()


@pytest.mark.parametrize("script", [responses, refuses, closes])
async def test_a_servers_time_is_not_the_gateways(script: object) -> None:
    async with scripted(script) as server, serving([model(server.port)]) as served:  # type: ignore[arg-type]
        async with client(served.port) as one:
            await one.request(request(chat()))
        (record,) = served.context.records
    assert record.duration > PAUSE and record.overhead < record.duration - PAUSE / 2


async def test_nor_is_that_of_a_client_that_does_not_wait() -> None:
    async with scripted(waits) as server, serving([model(server.port)]) as served:
        async with client(served.port) as one:
            one.send(request(chat()))
            await until(lambda: server.requests)
            await asyncio.sleep(PAUSE / 2)
        await until(lambda: served.context.records)
        (record,) = served.context.records
    assert record.status == 499 and record.overhead < record.duration - PAUSE / 4
