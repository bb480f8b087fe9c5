"""A client that disconnects, in any state: the server's connection closes at once, and everything is released."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.client.connection import ClientConnection
from gateway.client.request import ClientRequest
from gateway.proxy.response import EventRelay
from tests.support.running import Served, model, serving, soon, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, DONE, HELLO, ROLE, SHOWN, Client, chat, client, request
from upstream.balancing.attempt import UpstreamResponse
from upstream.http.connection import Connection
from upstream.http.deadlines import Timeouts

CLOSED_WITHIN = 2.0
"""Seconds in which the loop runs: the bound of these tests, generous for a busy machine; the promise is 0.1."""


class Silent:
    """A server that sends a little, or nothing, and then waits for the end of its connection."""

    def __init__(self, sends: bytes) -> None:
        self.sends = sends
        self.received = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def __call__(self, talk: Conversation) -> None:
        self.received.set()
        if self.sends:
            await talk.write(self.sends)
        await talk.closed_by_peer()
        self.disconnected.set()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def gone(served: Served, status: str = "499") -> None:
    await until(lambda: served.in_flight == 0)
    assert served.value("requests_total", "tiny", "/v1/chat/completions", status) == 1


@pytest.mark.parametrize(
    ("sends", "stream"),
    [
        pytest.param(b"", True, id="before the headers"),
        pytest.param(HEAD, True, id="before the first token"),
        pytest.param(HEAD + chunk(ROLE) + chunk(HELLO), True, id="mid-stream"),
        pytest.param(b"", False, id="waiting for a plain response"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1000\r\n\r\na", False, id="in a plain text"),
    ],
)
@pytest.mark.parametrize("way", ["reset", "close", "half-close"])
async def test_a_disconnect_closes_the_servers_connection(sends: bytes, stream: bool, way: str) -> None:
    silent = Silent(sends)
    async with scripted(silent) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request(chat(stream=stream)))
        await silent.received.wait()
        if b"chunked" in sends and sends != HEAD:
            await one.reader.readuntil(HELLO)
        else:
            await asyncio.sleep(0.05)
        _disconnect(one, way)
        since = time.perf_counter()
        await soon(silent.disconnected.is_set, CLOSED_WITHIN)
        print(f"closed after {(time.perf_counter() - since) * 1000:.1f} ms")
        await gone(served)
        assert served.value("incomplete_total", "tiny", "client") == 1
        await until(lambda: server.open == 0)


def _disconnect(one: Client, way: str) -> None:
    if way == "reset":
        one.disconnect()
    elif way == "close":
        one.writer.close()
    else:
        one.writer.write_eof()


@asynccontextmanager
async def full_backlog() -> AsyncIterator[int]:
    """A port whose queue of connections is full: connecting to it hangs."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        fillers.append(filler)
    await asyncio.sleep(0.05)
    try:
        yield listener.getsockname()[1]
    finally:
        for each in (*fillers, listener):
            each.close()


@pytest.mark.parametrize("disconnects", [False, True])
async def test_nothing_of_a_stream_waits_for_the_collector(disconnects: bool) -> None:
    """Bodies and buffers would wait with it, for as long as the collector finds nothing to do."""

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        for event in (ROLE, HELLO, HELLO):
            await talk.chunk(event)
        if disconnects:
            await talk.closed_by_peer()
        else:
            await talk.chunk(DONE)
            await talk.end_stream()

    kinds = (ClientRequest, UpstreamResponse, EventRelay, ClientConnection, *((Connection,) if disconnects else ()))
    async with scripted(script) as server, serving([model(server.port)]) as served:
        gc.collect()
        gc.disable()
        try:
            async with client(served.port) as one:
                one.send(request(chat(stream=True)))
                await one.events(3 if disconnects else 4)
            await until(lambda: served.in_flight == 0 and not served.connections)
            await until(lambda: not [kind for each in gc.get_objects() if (kind := type(each)) in kinds])
        finally:
            gc.enable()


async def test_a_disconnect_while_the_server_is_being_connected() -> None:
    timeouts = Timeouts(connect=600.0)
    async with full_backlog() as port, serving([model(port, timeouts=timeouts)]) as served, client(served.port) as one:
        one.send(request())
        await until(lambda: served.total("server_inflight") == 1)
        one.disconnect()
        await soon(lambda: served.in_flight == 0, CLOSED_WITHIN)
        await gone(served)


async def test_a_connection_in_use_by_another_is_not_touched() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with (
        scripted(script) as server,
        serving([model(server.port)]) as served,
        client(served.port) as one,
        client(served.port) as other,
    ):
        one.send(request())
        other.send(request())
        await until(lambda: len(server.requests) == 2)
        other.disconnect()
        await until(lambda: served.total("server_inflight") == 1)
        release.set()
        assert (await one.reply()).body == COMPLETION
        await gone(served)


async def test_a_disconnect_is_noticed_while_requests_are_pipelined() -> None:
    silent = Silent(b"")
    async with scripted(silent) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request() + request() + request())
        await silent.received.wait()
        one.disconnect()
        await soon(silent.disconnected.is_set, CLOSED_WITHIN)
        await until(lambda: served.in_flight == 0)
        assert len(server.requests) == 1


async def test_a_disconnect_while_the_body_is_sent() -> None:
    async def never(_: Conversation) -> None:
        raise AssertionError

    async with scripted(never) as server, serving([model(server.port)]) as served, client(served.port) as one:
        whole = request()
        one.send(whole[:-10])
        await until(lambda: served.context.inflight.in_flight == 1)
        one.disconnect()
        await until(lambda: served.in_flight == 0)
        assert server.requests == []


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/chat/completions", SHOWN),
        (
            "/v1/messages",
            (b'event: message_start\ndata: {"type":"message_start"}\n\n', b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ),
    ],
)
async def test_a_disconnect_after_the_last_event_is_not_a_truncation(path: str, events: tuple[bytes, ...]) -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(b"".join(events))
        await talk.closed_by_peer()  # the end of the body never comes

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request(chat(stream=True), path))
        await one.reader.readuntil(events[-1])
        one.disconnect()
        await until(lambda: served.in_flight == 0 and server.open == 0)
        assert served.value("requests_total", "tiny", path, "200") == 1
        assert served.total("incomplete_total") == 0
