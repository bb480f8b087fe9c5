"""Hostile servers: memory stays bounded, the client gets a 502 or an error event, and the next request is served."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable

import psutil
import pytest

from tests.faults.conftest import FULL
from tests.faults.invariants import unharmed
from tests.support.running import Served, model, until
from tests.support.scripted import Conversation, Script, scripted
from tests.support.wire import COMPLETION, DONE, ROLE, Reply, chat, request, request_once
from upstream.http.deadlines import Timeouts

OK = b"HTTP/1.1 200 OK\r\n"
JSON_HEAD = OK + b"content-type: application/json\r\n"
ERROR = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
FLOOD = (1 << 30) if FULL else (96 << 20)
"""Bytes of an endless response."""
GROWTH = 48 << 20
"""Bytes by which the process may grow meanwhile: buffers of the sockets, the server and the gateway, and free memory of the allocator."""
PIECE = b"x" * 65536


def says(*pieces: bytes) -> Script:
    """Return the script of a server that sends these pieces and closes the connection."""

    async def script(talk: Conversation) -> None:
        for piece in pieces:
            await talk.write(piece)
        await asyncio.sleep(0)
        talk.writer.close()

    return script


def floods(start: bytes, piece: bytes) -> Callable[[list[int]], Script]:
    """Return a factory of scripts that send ``piece`` until the gateway disconnects. ``sent`` counts the bytes."""

    def make(sent: list[int]) -> Script:
        async def script(talk: Conversation) -> None:
            await talk.write(start)
            while sent[0] < FLOOD:
                await talk.write(piece)
                sent[0] += len(piece)
            talk.writer.close()

        return script

    return make


RESPONSES: dict[str, bytes] = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a status that is none": b"HTTP/1.1 2000 OK\r\ncontent-length: 2\r\n\r\n{}",
    "CR in a header": JSON_HEAD + b"x-a: b\rset-cookie: c=d\r\ncontent-length: 2\r\n\r\n{}",
    "NUL in a header": JSON_HEAD + b"x-a: b\0c\r\ncontent-length: 2\r\n\r\n{}",
    "a space before the colon": JSON_HEAD + b"content-length : 2\r\n\r\n{}",
    "two lengths": JSON_HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
    "a negative length": JSON_HEAD + b"content-length: -2\r\n\r\n{}",
    "a length and chunks": JSON_HEAD + b"content-length: 2\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\n\r\n",
    "a chunk without a size": JSON_HEAD + CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": JSON_HEAD + CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "a chunk of 2^70 bytes": JSON_HEAD + CHUNKED + b"4000000000000000000\r\n{}",
    "a chunk longer than its size": JSON_HEAD + CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "nothing": b"",
    "half a head": OK[:9],
    "a head alone": JSON_HEAD + b"content-length: 5\r\n\r\n",
    "gzip": JSON_HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (len(gzip.compress(b"{}")), gzip.compress(b"{}")),
    "HTTP/2.0 in a status line": b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\n{}",
    "HTTP/0.9 in a status line": b"HTTP/0.9 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/2.0 behind an interim answer": b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "gzip as a transfer encoding, and chunks": JSON_HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "gzip as a transfer encoding": JSON_HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "a content type of 100,000 bytes": OK + b"content-type: a/" + b"b" * 100_000 + b"\r\ncontent-length: 2\r\n\r\n{}",
    "a stream's content type of 100,000 bytes": OK + b"content-type: text/event-stream;" + b"b" * 100_000 + b"\r\n" + CHUNKED,
    "gzip, in capitals": b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Encoding: GZIP\r\nContent-Length: 2\r\n\r\n{}",
}  # fmt: skip

FLOODS: dict[str, Callable[[list[int]], Script]] = {
    "a status line without end": floods(b"HTTP/1.1 200 ", PIECE),
    "a header without end": floods(OK + b"x-a: ", PIECE),
    "headers without end": floods(OK, b"x-a: b\r\n" * 1000),
    "interim answers without end": floods(b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 1000),
    "empty interim answers without end": floods(b"", b"HTTP/1.1 100\r\n\r\n" * 1000),
    "a chunk's extension without end": floods(JSON_HEAD + CHUNKED + b"2;", PIECE),
    "trailers without end": floods(JSON_HEAD + CHUNKED + b"0\r\n", b"x-a: b\r\n" * 1000),
}
STREAM = OK + b"content-type: text/event-stream\r\n" + CHUNKED


async def _watched(served: Served, send: Callable[[], Awaitable[Reply]]) -> tuple[Reply, int]:
    """Return the reply and the largest growth of the process."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    task = asyncio.ensure_future(send())
    while not task.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.01)
    await until(lambda: served.in_flight == 0)
    return task.result(), most - before


@pytest.mark.row(29)
async def test_malformed_responses(measured: Callable[[str], None]) -> None:
    sent: list[bytes] = [b""]

    async def script(talk: Conversation) -> None:
        await says(sent[0])(talk)

    async with scripted(script) as server, unharmed([model(server.port)]) as served:
        for name, wire in RESPONSES.items():
            sent[0] = wire
            for stream in (False, True):
                reply = await asyncio.wait_for(request_once(served.port, request(chat(stream=stream))), 20)
                reported = reply.status == 502 and reply.error["code"] == "upstream_disconnected"
                assert reported or (reply.status == 200 and not reply.whole), f"{name}: {reply}"
                assert "set-cookie" not in reply.headers
        sent[0] = JSON_HEAD + b"content-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)
        assert (await request_once(served.port, request())).body == COMPLETION
    measured(f"{len(RESPONSES)} malformed responses: each a 502, or truncated if the response had started")


@pytest.mark.row(29)
@pytest.mark.parametrize("name", FLOODS)
async def test_endless_headers(name: str) -> None:
    sent = [0]
    async with scripted(FLOODS[name](sent)) as server, unharmed([model(server.port)]) as served:
        reply, grown = await _watched(served, lambda: asyncio.wait_for(request_once(served.port, request()), 60))
        assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
        assert sent[0] < FLOOD and grown < GROWTH
        await until(lambda: server.open == 0)


@pytest.mark.row(29)
@pytest.mark.parametrize("value", [b"9" * 100_000, b"1" * 6, b"-5", b"soon"])
async def test_an_invalid_retry_after_is_not_forwarded(value: bytes) -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: %b\r\ncontent-length: 0\r\n\r\n" % value
    async with scripted(says(head)) as server, unharmed([model(server.port)]) as served:
        reply = await request_once(served.port, request())
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.row(29)
async def test_an_error_event_of_text_is_bounded() -> None:
    text = b"event: error\ndata: " + b"at /opt/x.py " * 50_000 + b"\n\n"
    async with scripted(says(STREAM, b"%x\r\n%b\r\n" % (len(text), text))) as server, unharmed([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True)))
        assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected") and b"/opt" not in reply.body


@pytest.mark.row(29)
@pytest.mark.parametrize("begun", [False, True])
async def test_an_endless_event(begun: bool, measured: Callable[[str], None]) -> None:
    sent = [0]
    first = b"%x\r\n%b\r\n" % (len(ROLE), ROLE) if begun else b""
    flood = floods(STREAM + first + b"6\r\ndata: \r\n", b"10000\r\n" + PIECE + b"\r\n")
    async with scripted(flood(sent)) as server, unharmed([model(server.port)]) as served:
        reply, grown = await _watched(served, lambda: asyncio.wait_for(request_once(served.port, request(chat(stream=True))), 60))
        if begun:
            assert reply.status == 200 and reply.whole and reply.body.startswith(ROLE + b'data: {"error":') and reply.body.endswith(DONE)
        else:
            assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
        assert sent[0] < 32 << 20 and grown < GROWTH
        await until(lambda: server.open == 0)
    measured(f"an endless event: truncated after {sent[0] >> 20} MiB, memory {max(grown, 0) >> 20} MiB larger")


@pytest.mark.row(29)
@pytest.mark.parametrize("framing", [b"content-length: 99999999999\r\n\r\n", CHUNKED, b"\r\n"])
async def test_an_endless_error_is_cut(framing: bytes) -> None:
    sent = [0]
    piece = b"10000\r\n" + PIECE + b"\r\n" if framing == CHUNKED else PIECE
    async with scripted(floods(ERROR + framing, piece)(sent)) as server, unharmed([model(server.port)]) as served:
        reply, grown = await _watched(served, lambda: asyncio.wait_for(request_once(served.port, request()), 60))
        assert (reply.status, reply.error["code"]) == (500, "server_error")
        assert sent[0] < 32 << 20 and grown < GROWTH
        await until(lambda: server.open == 0)


@pytest.mark.row(29)
async def test_an_error_that_trickles_is_cut(measured: Callable[[str], None]) -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(ERROR + CHUNKED)
        while True:
            await talk.chunk(b" ")
            await asyncio.sleep(0.05)

    async with scripted(script) as server, unharmed([model(server.port, timeouts=Timeouts(idle=600, total=3600))]) as served:
        since = time.monotonic()
        reply = await asyncio.wait_for(request_once(served.port, request()), 60)
        took = time.monotonic() - since
        assert (reply.status, reply.error["code"]) == (500, "server_error")
        await until(lambda: server.open == 0)
    measured(f"an error's body that trickles: reported after {took:.0f} s")


@pytest.mark.row(29)
async def test_wrong_content_lengths() -> None:
    """A response shorter than its length is truncated. Bytes beyond the length close the connection and never reach the next request."""
    sent: list[bytes] = [b""]

    async def script(talk: Conversation) -> None:
        await talk.write(sent[0])
        if b"999" in sent[0]:
            talk.writer.close()

    async with scripted(script) as server, unharmed([model(server.port)]) as served:
        sent[0] = JSON_HEAD + b"content-length: 999\r\n\r\n{}"
        reply = await request_once(served.port, request())
        assert (reply.status, reply.whole) == (200, False) or reply.status == 502
        poison = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison"
        sent[0] = JSON_HEAD + b"content-length: %d\r\n\r\n%b%b" % (len(COMPLETION), COMPLETION, poison)
        for _ in range(20):
            reply = await request_once(served.port, request())
            assert b"poison" not in reply.body and reply.status in (200, 502)
        sent[0] = JSON_HEAD + b"content-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)
        assert (await request_once(served.port, request())).body == COMPLETION
