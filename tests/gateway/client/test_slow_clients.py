"""Slow clients: a timeout counts only while the gateway waits for the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.snapshot.snapshot import Clients
from tests.gateway.client.test_connection import lazy, only
from tests.gateway.proxy.test_form import MODEL, form, part
from tests.support.running import Served, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, Client, chat, client, request

QUICK = Clients(headers_timeout=0.3, body_timeout=0.3, write_timeout=0.3)
SLOW_READERS = Clients(headers_timeout=0.3, body_timeout=0.3, write_timeout=5.0)
"""For a reader that must not be cut. It runs in this process, which may be suspended for a while."""
LONGER_THAN_TIMEOUTS = 4.0
"""Seconds. Checks are a second apart, so a timeout of QUICK takes effect earlier."""


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


def serving_quickly(*ports: int, **more: Any) -> Any:
    return serving([model(*ports)], clients=QUICK, **more)


def faults(served: Served, reason: str) -> float:
    return served.value("client_faults_total", reason)


async def timed_out(one: Client) -> None:
    """Expect the error, and the end of the connection."""
    async with asyncio.timeout(20):
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        assert reply.headers["connection"] == "close"
        assert await one.closed()


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\r\n\r\n"])
async def test_a_silent_connection_is_closed(before: bytes) -> None:
    async with serving_quickly(1) as served, client(served.port) as one:
        one.send(before)
        async with asyncio.timeout(20):
            assert await one.closed()
        assert faults(served, "silent") == 1
        await until(lambda: not served.connections)


async def _unfinished_head(served: Served, used_before: bool, trickle: bytes) -> None:
    async with client(served.port) as one:
        if used_before:
            assert (await one.request(request())).status == 200
        one.send(request()[:40])
        await _until_timed_out(one, trickle)


async def test_headers_that_are_not_completed() -> None:
    async with scripted(respond) as server, serving_quickly(server.port) as served:
        cases = [(False, b""), (True, b""), (False, b"a" * 10_000), (True, b"a" * 10_000)]
        await asyncio.gather(*(_unfinished_head(served, *case) for case in cases))
        assert faults(served, "slow_head") == len(cases)
        await until(lambda: not served.connections)


async def _until_timed_out(one: Client, trickle: bytes) -> None:
    trickling = asyncio.create_task(_trickle(one, trickle))
    await timed_out(one)
    trickling.cancel()


async def _trickle(one: Client, data: bytes) -> None:
    for byte in data:
        one.send(bytes([byte]))
        await asyncio.sleep(0.02)


async def _unfinished_body(served: Served, whole: bytes, trickles: bool) -> None:
    async with client(served.port) as one:
        one.send(whole[:-9000])
        await _until_timed_out(one, whole[-9000:] if trickles else b"")


async def test_bodies_that_are_not_completed() -> None:
    bodies = request(chat(user="u" * 10_000)), form(MODEL, part("file", b"x" * 10_000))
    async with scripted(respond) as server, serving_quickly(server.port) as served:
        await asyncio.gather(*(_unfinished_body(served, body, trickles) for body in bodies for trickles in (False, True)))
        assert faults(served, "slow_body") == 4
        await until(lambda: served.in_flight == 0)
        assert [(record.status, record.code) for record in served.context.records] == 4 * [(408, "request_timeout")]
        assert server.requests == []


async def test_a_body_that_is_discarded() -> None:
    async with serving_quickly(1) as served, client(served.port) as one:
        one.send(request(path="/nowhere", body=b"x" * 1000)[:-10])
        assert (await one.reply()).status == 404
        async with asyncio.timeout(20):
            assert await one.closed()
        assert faults(served, "slow_body") == 1


async def test_a_slow_server_is_not_a_fault_of_the_client() -> None:
    async def slow(talk: Conversation) -> None:
        await asyncio.sleep(LONGER_THAN_TIMEOUTS if talk.number == 1 else 0)
        await respond(talk)

    async with scripted(slow) as server, serving_quickly(server.port) as served, client(served.port) as one:
        behind = request()
        one.send(request() + behind[:50])  # the head of the next is not finished either
        assert (await one.reply()).status == 200
        one.send(behind[50:])
        assert (await one.reply()).status == 200
        assert sum(faults(served, reason) for reason in ("silent", "slow_head", "slow_body", "slow_reader")) == 0


async def test_a_server_that_does_not_read_the_body_is_not_a_fault_of_the_client() -> None:
    whole = form(MODEL, part("file", b"x" * (8 << 20)))

    async def reluctant(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(LONGER_THAN_TIMEOUTS)
        await reader.readexactly(8 << 20)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(reluctant, "127.0.0.1", 0, limit=1 << 16) as server,
        serving_quickly(server.sockets[0].getsockname()[1]) as served,
        client(served.port) as one,
    ):
        one.send(whole)
        await until(lambda: only(served).flow.read_paused)
        assert (await one.reply()).status == 200
        assert faults(served, "slow_body") == 0


# Readers


async def _flood(talk: Conversation) -> None:
    await talk.begin_stream()
    while True:
        await talk.chunk(b"data: " + b"x" * 65536 + b"\n\n")


async def _big(talk: Conversation) -> None:
    await talk.respond(b'{"big":"' + b"x" * (16 << 20) + b'"}')


async def test_a_reader_that_stops_is_cut_in_its_stream() -> None:
    async with scripted(_flood) as server, serving_quickly(server.port) as served, lazy(served) as (one, _):
        one.send(request(chat(stream=True)))
        await until(lambda: server.requests)
        await until(lambda: served.in_flight == 0 and server.open == 0, 20)
        (record,) = served.context.records
        assert (record.status, record.incomplete) == (499, "client")
        assert faults(served, "slow_reader") == 1
        await until(lambda: not served.connections)


@pytest.mark.parametrize("closes", [False, True], ids=["keep-alive", "close"])
async def test_a_reader_that_stops_is_cut_after_the_response_was_written(closes: bool) -> None:
    """The server is free as soon as its response is in the transport's buffer. The connection must not stay open."""
    async with scripted(_big) as server, serving_quickly(server.port) as served, lazy(served) as (one, _):
        one.send(request(extra=("connection: close",) if closes else ()))
        await until(lambda: served.context.records, 20)
        assert served.in_flight == 0
        await until(lambda: not served.connections, 20)
        assert faults(served, "slow_reader") == 1


async def test_a_reader_that_stops_is_cut_though_more_bytes_wait() -> None:
    """They are not parsed before the response has been sent."""
    async with scripted(_big) as server, serving_quickly(server.port) as served, lazy(served) as (one, _):
        one.send(request() * 3 + b"no HTTP\r\n\r\n")
        await until(lambda: not served.connections, 20)
        assert (faults(served, "malformed"), faults(served, "slow_reader")) == (0, 1)
        await until(lambda: served.in_flight == 0 and server.open == 0)


async def test_a_reader_that_is_slow_is_not_cut() -> None:
    async with scripted(_big) as server, serving([model(server.port)], clients=SLOW_READERS) as served, lazy(served) as (one, _):
        one.send(request())
        one.writer.transport.resume_reading()  # type: ignore[attr-defined]  # every transport here reads
        head = await one.reader.readuntil(b"\r\n\r\n")
        length = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length")))
        for _ in range(32):  # for longer than the deadline
            await one.reader.readexactly(length // 32)
            await asyncio.sleep(0.2)
        assert faults(served, "slow_reader") == 0
        assert only(served).transport.get_write_buffer_size() >= 0
