"""Client connections: keep-alive, pipelining, the forms of a request, refusals and slow clients."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson
import pytest

from gateway.client.connection import ClientConnection
from gateway.client.http.head import MAX_HEAD, is_host
from gateway.client.timeouts import KEEP_ALIVE
from gateway.snapshot.snapshot import Key
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.way import Wire, way
from tests.support.wire import COMPLETION, EVENTS, HELLO, SHOWN, STREAM_HEAD, Client, chat, client, request, request_once

HEALTH = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"


async def respond(talk: Conversation) -> None:
    """Echoes the request's ``user`` field in its answer, plain or as a stream."""
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        for event in EVENTS:
            await talk.chunk(event)
        await talk.end_stream()
    elif "user" in talk.request.json:
        await talk.respond(orjson.dumps({"user": talk.request.json["user"]}))
    else:
        await talk.respond(COMPLETION)


def only(served: Served) -> ClientConnection:
    (connection,) = served.connections
    assert isinstance(connection, ClientConnection)
    return connection


async def user(one: Client) -> object:
    reply = await one.reply()
    assert reply.status == 200
    return orjson.loads(reply.body)["user"]


# One connection, several requests


async def test_requests_one_after_the_other() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        for n in range(5):
            one.send(request(chat(user=str(n))))
            assert await user(one) == str(n)
        assert (await one.request(HEALTH)).status == 200
        assert (await one.request(request(b"{"))).status == 400
        assert (await one.request(request(token="sk-wrong"))).status == 401
        assert (await one.request(request(path="/nowhere"))).status == 404
        assert (await one.request(request())).body == COMPLETION
        assert len(served.connections) == 1


@pytest.mark.parametrize(
    "arrived", [b"", request(), request()[:20], b"GET / HTTP/9.9\r\n\r\n"], ids=["nothing", "all", "a part", "no HTTP"]
)
async def test_a_request_that_has_arrived_before_its_connection_is_made(arrived: bytes) -> None:
    """A busy worker reads it at once, and not one iteration of its event loop later."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with way() as made, ours, theirs:
        theirs.sendall(arrived)
        connection, wire = made.worker.connection(), Wire(ours)
        connection.connection_made(wire)
        made.write_batch.flush()
        assert connection.parser.number == bool(arrived)
        assert made.server_wire.take() if arrived == request() else not made.server_wire.written
        assert bool(wire.written) == (b"9.9" in arrived)
        if len(arrived) == 20:
            wire.set_protocol(connection)
            wire.receive(request()[20:])
            made.write_batch.flush()
            assert made.server_wire.take()
        connection.connection_lost(None)


async def test_pipelined_requests_get_their_responses_in_order() -> None:
    async def slow_first(talk: Conversation) -> None:
        await asyncio.sleep(0.05 if talk.number == 1 else 0)
        await respond(talk)

    async with scripted(slow_first) as server, serving([model(server.port)]) as served, client(served.port) as one:
        wire = b"".join(request(chat(user=str(n))) + HEALTH + request(path="/nowhere", body=b"x" * 70_000) for n in range(4))
        one.send(wire)
        for n in range(4):
            assert await user(one) == str(n)
            assert (await one.reply()).body == b'{"status":"ok"}'
            assert (await one.reply()).status == 404
        one.send(request())
        assert (await one.reply()).body == COMPLETION
        assert served.in_flight == 0


@pytest.mark.parametrize("ahead", [HEALTH, request(), request(path="/nowhere", body=b"x" * 200_000)])
async def test_a_disconnect_is_noticed_behind_pipelined_requests(ahead: bytes) -> None:
    received, disconnected = asyncio.Event(), asyncio.Event()

    async def script(talk: Conversation) -> None:
        received.set()
        await talk.closed_by_peer()
        disconnected.set()

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request() + ahead)
        await received.wait()
        await asyncio.sleep(0.05)
        one.disconnect()
        async with asyncio.timeout(30):
            await disconnected.wait()
        await until(lambda: served.in_flight == 0)


@pytest.mark.parametrize(
    "ahead", [HEALTH[:-2] + b"x: %b\r\n\r\n" % (b"y" * 5000), request(chat(user="u" * 9000)), request(path="/nowhere", body=b"x" * 70_000)]
)
async def test_requests_behind_a_request_are_received_in_their_turn(ahead: bytes) -> None:
    """At most one read of them is stored meanwhile. The others stay in the kernel."""
    release, number = asyncio.Event(), 1_000_000 // len(ahead)

    async def script(talk: Conversation) -> None:
        await release.wait()
        await respond(talk)

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request() + ahead * number)
        connection = only(served)
        await until(lambda: len(server.requests) == 1 and connection.flow.reading_held)
        assert 0 < len(connection.parser.stored) < 1 << 20
        release.set()
        assert [(await one.reply()).status for _ in range(2)] == [200, 404 if b"/nowhere" in ahead else 200]
        for _ in range(number - 1):
            await one.reply()
        assert (await one.request(request())).status == 200
        assert not connection.flow.reading_held


@asynccontextmanager
async def lazy(served: Served) -> AsyncIterator[tuple[Client, ClientConnection]]:
    """A client that does not read yet, behind small buffers, and its connection at the gateway."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    small.connect(("127.0.0.1", served.port))
    one = Client(*await asyncio.open_connection(sock=small, limit=1 << 16))
    one.writer.transport.pause_reading()  # type: ignore[attr-defined]  # every transport here reads
    await until(lambda: len(served.connections) == 1)
    connection = only(served)
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    try:
        yield one, connection
    finally:
        one.disconnect()


async def test_a_client_that_reads_no_responses_cannot_send_more_requests() -> None:
    async with serving([model(1)]) as served, lazy(served) as (one, connection):
        sent = 0
        while not connection.flow.read_paused:
            assert connection.transport.get_write_buffer_size() < 1 << 20
            for _ in range(16):
                one.send(request(token=None))
            sent += 16
            await until(lambda sent=sent: served.total("requests_total") >= sent or connection.flow.read_paused)
        one.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(sent):
            assert (await one.reply()).status == 401
        await until(lambda: not connection.flow.read_paused)


async def test_idle_connections_end_and_busy_ones_do_not() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await respond(talk)

    async with scripted(script) as server, serving([model(server.port)]) as served:
        for ahead in (b"", HEALTH, request(token=None)):
            release.clear()
            async with client(served.port) as one:
                await until(lambda: len(served.connections) == 1)
                connection = only(served)
                later = asyncio.get_running_loop().time() + KEEP_ALIVE + 1
                one.send(ahead + request())
                if ahead:
                    await one.reply()
                await until(lambda: served.context.inflight.in_flight == 1)
                connection.check(later)
                release.set()
                assert (await one.reply()).body == COMPLETION, "a request in progress was cut"
                now = asyncio.get_running_loop().time()
                connection.check(now)  # seen idle for the first time
                connection.check(now + KEEP_ALIVE / 2)
                assert not connection.transport.is_closing()
                connection.check(now + KEEP_ALIVE + 1)
                assert await one.closed()
            await until(lambda: not served.connections)


# How a request may be written


async def test_a_body_in_tiny_pieces() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        for byte in request(chat(user="tiny")):
            one.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await user(one) == "tiny"
        assert len(server.requests) == 1


async def test_a_chunked_body() -> None:
    body = orjson.dumps(chat(user="c" * 1000))
    head = request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7))
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        for end in (b"0\r\n\r\n", b"0\r\nx-trailer: y\r\ncontent-type: text/plain\r\n\r\n"):
            one.send(head + chunks + end)
            assert await user(one) == "c" * 1000
        assert (await one.request(request())).body == COMPLETION
        assert all(seen.header("content-length") for seen in server.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
async def test_an_old_client(stream: bool, keep: bool) -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        extra = ("connection: keep-alive",) if keep else ()
        reply = await one.request(request(chat(stream=stream), extra=extra).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert reply.status == 200
        assert "transfer-encoding" not in reply.headers
        assert reply.body == (b"".join(SHOWN) if stream else COMPLETION)
        if keep and not stream:
            assert reply.headers["connection"] == "keep-alive"
            assert (await one.request(request())).body == COMPLETION
        else:
            assert await one.closed()


async def test_a_client_that_asks_to_close() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served:
        for stream in (False, True):
            async with client(served.port) as one:
                reply = await one.request(request(chat(stream=stream), extra=("connection: close",)) + request())
                assert reply.headers["connection"] == "close" and reply.whole
                assert await one.closed()
        assert len(server.requests) == 2, "what follows a close is not served"


async def test_expect_continue() -> None:
    whole = request(chat(user="e"), extra=("expect: 100-continue",))
    head, _, body = whole.partition(b"\r\n\r\n")
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(head + b"\r\n\r\n")
        assert await one.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        one.send(body)
        assert await user(one) == "e"
        one.send(head.replace(KEY.encode(), b"sk-wrong") + b"\r\n\r\n")
        reply = await one.reply()
        assert reply.status == 401 and reply.headers["connection"] == "close", "the body is not received for"


async def test_an_http_10_client_gets_no_continue() -> None:
    """HTTP/1.0 does not know it (RFC 9110, section 10.1.1)."""
    whole = request(chat(user="e"), extra=("expect: 100-continue",)).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = whole.partition(b"\r\n\r\n")
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(head + b"\r\n\r\n")
        await until(lambda: served.context.started == 1)
        one.send(body)
        assert await user(one) == "e"


async def test_a_key_that_becomes_valid_while_its_pipelined_request_waits() -> None:
    """The request is received in its turn, with the keys of that time."""
    release = asyncio.Event()

    async def slow(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with scripted(slow) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request() + request(token="sk-new"))
        await until(lambda: len(only(served).parser.stored) > 0)
        served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, keys=(key(), key("b", "sk-new"))))
        release.set()
        assert (await one.reply()).status == 200
        assert (await one.reply()).status == 200
        assert [each.key.id for each in served.context.records if each.key is not None] == ["team-a", "b"]


async def test_a_request_without_a_key_is_never_served_with_the_key_of_another_one() -> None:
    """A proxy in front of the gateway sends the requests of two clients on one connection. A whole read of one ends that of the other."""
    line = b"POST /v1/chat/completions HTTP/1.1\r\n"
    read = line + b"Content-Length: 2\r\n\r\n{}"
    with way() as one:
        one.client.data_received(line + b"Host: a\r\nAuthorization: Bearer %b\r\nX: " % KEY.encode())
        for _ in range(4):
            one.client.data_received(read)
        one.write_batch.flush()
        assert [each.key is not None for each in one.context.records] == [True]
        assert one.client_wire.take().count(b"HTTP/1.1 400") == 2, "no model, and then no Host: nothing is parsed behind it"


async def test_each_request_of_a_connection_is_authenticated() -> None:
    async with scripted(respond) as server, serving([model(server.port)], (key("a", "sk-a"), key("b", "sk-b"))) as served:

        async def owner(one: Client, token: str) -> str:
            reply = await one.request(request(token=token))
            found = served.context.records[-1].key
            return str(reply.error["code"]) if found is None else found.id

        def configure(*keys: Key) -> None:
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=served.worker.snapshot.version + 1, keys=keys))

        async with client(served.port) as one:
            assert [await owner(one, token) for token in ("sk-a", "sk-a", "sk-a", "sk-b", "sk-b", "sk-a")] == list("aaabba")
            assert await owner(one, "sk-c") == "invalid_api_key"
            assert [await owner(one, token) for token in ("sk-a", "sk-a")] == ["a", "a"]
            configure(key("b", "sk-b"))
            assert await owner(one, "sk-a") == "invalid_api_key", "the key was removed"
            configure(key("c", "sk-a"))
            assert [await owner(one, "sk-a") for _ in range(3)] == ["c"] * 3
            configure(key("c", "sk-a", revoked=True))
            assert await owner(one, "sk-a") == "invalid_api_key", "the key was revoked"


async def test_a_key_expires_while_its_connection_is_used() -> None:
    expiring = key("a", "sk-a", expires=time.time() + 0.5)
    async with scripted(respond) as server, serving([model(server.port)], (expiring,)) as served, client(served.port) as one:
        statuses = set()
        async with asyncio.timeout(30):
            while 401 not in statuses:
                statuses.add((await one.request(request(token="sk-a"))).status)
        assert statuses <= {200, 401}


@pytest.mark.parametrize("pieces", [1, 3, 500])
async def test_an_offer_of_another_protocol_is_ignored(pieces: int) -> None:
    extra = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")
    sized = request(chat(user="sized"), extra=extra)
    body = orjson.dumps(chat(user="chunked"))
    chunked = request(b"", extra=extra).replace(b"content-length: 0", b"transfer-encoding: chunked")
    wire = sized + chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + request(b"", extra=extra) + request(chat(user="last"))
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        for at in range(0, len(wire), len(wire) // pieces + 1):
            one.send(wire[at : at + len(wire) // pieces + 1])
            await asyncio.sleep(0)
        assert await user(one) == "sized"
        assert await user(one) == "chunked"
        assert (await one.reply()).status == 400
        assert await user(one) == "last"
        websocket = HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await one.request(websocket)).status == 200


@pytest.mark.parametrize(("method", "status"), [("HEAD", 405), ("OPTIONS", 405), ("GET", 405), ("DELETE", 405), ("PUT", 405)])
async def test_other_methods(method: str, status: int) -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request(b"", method=method))
        head = await one.reader.readuntil(b"\r\n\r\n")
        assert int(head.split()[1]) == status and b"allow: POST" in head
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        if method != "HEAD":
            await one.reader.readexactly(length)
        assert (await one.request(request())).body == COMPLETION


# Refusals while bytes still come


async def test_a_client_that_still_sends_a_refused_body_can_read_the_response() -> None:
    async with scripted(respond) as server, serving([model(server.port)], body_limit=1 << 24) as served:
        for token, size in (("sk-wrong", 8 << 20), (KEY, (1 << 24) + 1)):
            async with client(served.port) as one:
                one.send(request(b"x" * size, token=token))
                reply = await one.reply()
                assert reply.status == (401 if token != KEY else 413)
                assert reply.headers["connection"] == "close"
                assert await one.closed()
        assert server.requests == []


async def test_a_refused_request_has_one_response_whatever_follows() -> None:
    head = request(b"", token="sk-wrong").replace(b"content-length: 0", b"transfer-encoding: chunked")

    async def continues(port: int, rubbish: bytes) -> None:
        async with client(port) as one:
            one.send(head + b"2\r\nab\r\n")
            assert (await one.reply()).status == 401
            one.send(rubbish)
            async with asyncio.timeout(30):
                assert await one.reader.read() == b"", "a second answer"

    async with scripted(respond) as server, serving([model(server.port)]) as served:
        rubbish = (b"", b"zz\r\nrubbish", b"1\r\nxxxx", b"0\r\n bad\r\n\r\nGARBAGE\r\n\r\n", b"0\r\n\r\n" + request())
        await asyncio.gather(*(continues(served.port, each) for each in rubbish))
        assert server.requests == []


@pytest.mark.parametrize("size", [MAX_HEAD + 1, 200_000])
@pytest.mark.parametrize("pieces", [1, 5])
async def test_headers_that_are_too_large(size: int, pieces: int) -> None:
    wire = request(extra=("x-long: " + "a" * size,))
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        step = len(wire) // pieces + 1
        for at in range(0, len(wire), step):
            one.send(wire[at : at + step])
            await asyncio.sleep(0.01)
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (431, "headers_too_large")
        assert server.requests == []


async def test_trailers_are_bounded() -> None:
    head = request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(head + b"2\r\n{}\r\n0\r\nx: ")
        for _ in range(20):
            one.send(b"a" * 10_000)
            await asyncio.sleep(0.002)
        assert (await one.reply()).status == 431


@pytest.mark.parametrize("whole", [request(b""), request(b"", "/v1/models", method="GET", token=None)])
async def test_trailers_are_no_headers(whole: bytes) -> None:
    """A proxy in front of the gateway has checked the headers only."""
    key = f"authorization: Bearer {KEY}\r\n".encode()
    head = whole.replace(b"content-length: 0", b"transfer-encoding: chunked").replace(key, b"")
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        reply = await one.request(head + b"0\r\n" + key + b"\r\n")
        assert (reply.status, reply.error["code"]) == (401, "missing_api_key")
        assert (await one.request(request())).status == 200, "and behind them begins another request"


@pytest.mark.parametrize("name", ["authorization", "content-type", "host", "content-encoding"])
async def test_a_header_that_decides_comes_once(name: str) -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served:
        line = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "host": "test"}.get(name, "identity")
        extra = (f"{name.upper()}: {line}",) * (2 if name == "content-encoding" else 1)
        reply = await request_once(served.port, request(extra=extra))
        assert (reply.status, reply.error["code"]) == (400, "invalid_request")
        assert (await request_once(served.port, request(extra=("accept: a", "accept: b")))).status == 200


GOOD_HOSTS = ["a", "test:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[2001:db8::5]:8000", "my_service.my-ns.svc", "a.", "a:", "%C3%A4"]
BAD_HOSTS = ["", " ", ":80", "a b", "a\tb", "evil/../x", "[::1", "::1", "]", "[]", "[a]", "a:port", "a:-1", "a:999999", "u@a", "a?", "a#b"]
BAD_HOSTS += ["a,b,\xff", "a%2", "%zz", '"a"', "a\\b", "<a>", "a" * 256, "http://a"]


def test_what_is_a_host() -> None:
    assert [host for host in GOOD_HOSTS if not is_host(host.encode())] == []
    assert [host for host in BAD_HOSTS if is_host(host.encode("latin-1"))] == []


ROUTES = [request(), HEALTH, request(path="/nowhere"), request(b"", "/v1/models", method="GET")]


@pytest.mark.parametrize("whole", ROUTES)
async def test_a_request_names_one_host(whole: bytes) -> None:
    """With HTTP/1.1 it must, on every route; an older client need not (RFC 9112, section 3.2)."""
    line = b"host: test\r\n"
    async with scripted(respond) as server, serving([model(server.port)]) as served:

        async def status(data: bytes) -> int:
            async with client(served.port) as one:
                one.send(data)
                reply = await one.reply()
                assert reply.status != 400 or (reply.error["code"] == "invalid_request" and await one.closed())
                return reply.status

        good = await status(whole)
        assert good in (200, 404)
        named = [b"HOST: %b\r\n" % host.encode() for host in GOOD_HOSTS]
        assert set(await asyncio.gather(*(status(whole.replace(line, each)) for each in named))) == {good}
        bad = [b"", line * 2, *(b"host:%b\r\n" % host.encode("latin-1") for host in BAD_HOSTS)]
        assert set(await asyncio.gather(*(status(whole.replace(line, each)) for each in bad))) == {400}
        old = whole.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        assert [await status(old.replace(line, each)) for each in (line, b"", b"host: a b\r\n")] == [good, good, 400]


async def test_every_request_of_a_connection_names_its_host() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served:
        for bad in (b"", b"host: a b\r\n"):
            async with client(served.port) as one:
                assert (await one.request(request())).status == 200
                assert (await one.request(request().replace(b"host: test", b"host: other"))).status == 200
                old = request().replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: test", b"connection: keep-alive")
                assert (await one.request(old)).status == 200
                assert (await one.request(request().replace(b"host: test\r\n", bad))).status == 400
        assert len(server.requests) == 6


# Slow clients


async def test_a_slow_reader_slows_its_server_down() -> None:
    plain, sent = b'{"big":"' + b"x" * 50_000 + b'"}', 0

    async def flood(talk: Conversation) -> None:
        nonlocal sent
        if not talk.request.json.get("stream"):
            await talk.respond(plain)
            return
        talk.writer.transport.set_write_buffer_limits(0)
        await talk.begin_stream()
        while True:
            await talk.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536

    async with scripted(flood) as server, serving([model(server.port)]) as served, lazy(served) as (one, connection):
        one.send(request() + request(chat(stream=True)))  # the stream begins while the other response is not read yet
        await until(lambda: sent > 0)
        before = -1
        async with asyncio.timeout(60):
            while sent != before:
                before = sent
                await asyncio.sleep(0.25)
        assert connection.transport.get_write_buffer_size() < 4 << 20
        assert sent < 32 << 20, "what the sockets hold, and a little"
        one.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await one.reply()).body == plain
        await one.reader.readexactly(sent + (1 << 20))
        one.disconnect()
        await until(lambda: served.in_flight == 0 and server.open == 0)


async def test_a_client_that_disconnects_while_its_response_is_written() -> None:
    async def big(talk: Conversation) -> None:
        await talk.respond(b'{"big":"' + b"x" * (16 << 20) + b'"}')

    async with scripted(big) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request())
        await one.reader.readexactly(100_000)
        one.disconnect()
        await until(lambda: served.in_flight == 0)
        await until(lambda: server.open == 0)


# Closing


async def test_shutdown_closes_an_idle_connection_and_completes_a_request() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await release.wait()
        await respond(talk)

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as idle:
        await until(lambda: len(served.connections) == 1)
        async with client(served.port) as busy:
            busy.send(request() + request())
            await until(lambda: len(server.requests) == 1)
            for connection in tuple(served.connections):
                connection.shutdown()
            assert await idle.closed()
            release.set()
            reply = await busy.reply()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert await busy.closed()
        assert len(server.requests) == 1, "the pipelined request is not served"
        await until(lambda: not served.connections and not served.inline_tasks)


@pytest.mark.parametrize("ahead", [request(), HEALTH])
async def test_a_connection_that_closes_drops_pipelined_requests(ahead: bytes) -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(ahead.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1) + request() + HEALTH)
        reply = await one.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await one.closed()
        await until(lambda: not served.connections and served.in_flight == 0)
        assert len(server.requests) == (ahead == request())


async def test_writes_after_a_disconnect_are_dropped() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        assert (await one.request(request())).status == 200
        connection = only(served)
        transport = connection.transport
        one.disconnect()
        await until(lambda: not served.connections)
        transport.write(b"nothing is written any more")
        connection.pause_writing()
        connection.resume_writing()
        assert connection.current is None


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_an_offer_of_another_protocol_behind_a_request(version: bytes) -> None:
    offer = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n".replace(b"HTTP/1.1", version)
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request() + offer + b"\x81\x05hello")
        assert (await one.reply()).status == 200
        reply = await one.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close"), "and not 101"
        assert await one.closed()
        assert served.value("client_faults_total", "malformed") == 0


async def test_repeated_requests_of_different_lengths() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        for size in (1, 5, 5, 1000, 1, 30_000, 2):
            one.send(request(chat(user="u" * size)))
            assert await user(one) == "u" * size
        assert (await one.request(request(b"{"))).status == 400
        assert len(server.requests) == 7


async def test_an_event_that_arrives_just_before_the_clients_end_is_sent() -> None:
    """Its tokens are counted, so its bytes must not be dropped with the write batch. Later events are neither sent nor counted."""
    event = b"%x\r\n%b\r\n" % (len(HELLO), HELLO)
    with way() as one:
        one.streamed([STREAM_HEAD, event, event], include_usage=False)
        one.write_batch.batching = True  # as in a busy event loop
        one.server_wire.receive(event)
        assert one.client_wire.take() == b""
        one.client.eof_received()
        assert one.client_wire.take().count(HELLO) == 1
        assert one.server_wire.is_closing()
        (record,) = one.context.records
    assert record.gaps is not None and record.gaps.events == 3 and (record.status, record.incomplete) == (499, "client")


async def test_a_client_that_has_disconnected_before_it_is_accepted_harms_no_other() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as served:
        for _ in range(5):
            gone = socket.create_connection(("127.0.0.1", served.port))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()
        assert (await request_once(served.port, request())).status == 200
        await until(lambda: not served.connections)
