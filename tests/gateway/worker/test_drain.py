"""The drain of a worker: what is served, what is cancelled, and what is closed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

from gateway.worker.drain import drain
from tests.support.running import Served, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, SHOWN, chat, client, request


async def drained(served: Served, seconds: float) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        await drain(served.worker, None, listener, seconds)


async def test_requests_that_outlast_the_drain_get_an_error() -> None:
    async def script(talk: Conversation) -> None:
        if talk.request.json.get("stream"):
            await talk.begin_stream()
            await talk.chunk(SHOWN[0])
        await talk.closed_by_peer()

    async with (
        scripted(script) as server,
        serving([model(server.port)]) as served,
        client(served.port) as plain,
        client(served.port) as stream,
        client(served.port) as idle,
    ):
        plain.send(request())
        stream.send(request(chat(stream=True)))
        await stream.events(1)
        await until(lambda: len(server.requests) == 2 and len(served.connections) == 3)
        draining = asyncio.create_task(drained(served, 0.1))
        reply = await plain.reply()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (503, "draining", "close")
        assert b"draining" in await stream.reader.readuntil(b"draining")
        assert await idle.closed()
        await draining
        assert not served.inline_tasks and served.in_flight == 0
        assert {record.incomplete for record in served.context.records} == {"drain"}


async def test_requests_that_finish_in_time_are_served_and_their_connections_closed() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request())
        await until(lambda: server.requests)
        draining = asyncio.create_task(drained(served, 60))
        await until(lambda: not served.worker.connections.keep_alive)
        release.set()
        reply = await one.reply()
        assert (reply.status, reply.body) == (200, COMPLETION)
        assert await one.closed()
        await draining
