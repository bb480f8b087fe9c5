"""Request framing: a request whose end is ambiguous is refused.

The bytes of the table are sent over real sockets. Each is followed by a second request that a wrong parser would accept. The
comparison with h11, an independent HTTP parser, calls the callbacks of the connection directly, thousands of times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import h11
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.client.http.head import MAX_HEAD
from gateway.client.request import ClientRequest
from gateway.proxy.request_services import RequestServices
from gateway.snapshot.snapshot import Snapshot
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.metrics import WorkerMetrics
from gateway.worker.worker import Worker
from tests.faults.conftest import FULL
from tests.faults.invariants import unharmed
from tests.support.examples import examples
from tests.support.running import KEY, key, model, shared_counters, until
from tests.support.scripted import Conversation, scripted
from tests.support.way import Wire
from tests.support.wire import COMPLETION, Client, chat, client, request, request_once
from upstream.balancing.pool import live_servers

BODY = orjson.dumps(chat())
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"host: a\r\n"
KEYED = f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\n".encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def sized(*lines: bytes, body: bytes = BODY) -> bytes:
    return LINE + HOST + KEYED + b"".join(lines) + b"\r\n" + body


def chunked(size: bytes, *, behind: bytes = b"\r\n", last: bytes = b"0\r\n\r\n") -> bytes:
    """Return a request with a body of one chunk. ``size`` is the size line without its CRLF."""
    return LINE + HOST + KEYED + CHUNKED + b"\r\n" + size + b"\r\n" + BODY + behind + last


SIZE = b"%x" % len(BODY)
AMBIGUOUS = {
    "a length and chunks": sized(LENGTH, CHUNKED, body=CHUNKS),
    "chunks and a length": sized(CHUNKED, LENGTH, body=CHUNKS),
    "the same length twice": sized(LENGTH, LENGTH),
    "two lengths": sized(LENGTH, b"content-length: 5\r\n"),
    "a list of lengths": sized(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY))),
    "a negative length": sized(b"content-length: -5\r\n"),
    "a length with a plus": sized(b"content-length: +%d\r\n" % len(BODY)),
    "a hexadecimal length": sized(b"content-length: 0x%x\r\n" % len(BODY)),
    "a length with a fraction": sized(b"content-length: %d.0\r\n" % len(BODY)),
    "a length with an underscore": sized(b"content-length: 1_0\r\n"),
    "a length in two parts": sized(b"content-length: 1 0\r\n"),
    "a length beyond all numbers": sized(b"content-length: 99999999999999999999999\r\n"),
    "no length": sized(b"content-length: \r\n"),
    "xchunked": sized(b"transfer-encoding: xchunked\r\n", body=CHUNKS),
    "another encoding first": sized(b"transfer-encoding: gzip, chunked\r\n", body=CHUNKS),
    "another encoding last": sized(b"transfer-encoding: chunked, identity\r\n", body=CHUNKS),
    "identity": sized(b"transfer-encoding: identity\r\n", LENGTH),
    "no encoding": sized(b"transfer-encoding: \r\n", body=CHUNKS),
    "chunked twice": sized(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked with a parameter": sized(b"transfer-encoding: chunked;q=1\r\n", body=CHUNKS),
    "chunked before a tab": sized(b"transfer-encoding: chunked\t\r\n", body=CHUNKS),
    "chunked in quotes": sized(b'transfer-encoding: "chunked"\r\n', body=CHUNKS),
    "chunked behind a control character": sized(b"transfer-encoding: \x0bchunked\r\n", body=CHUNKS),
    "chunked of an old client": sized(CHUNKED, body=CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "an offer of another protocol": sized(b"upgrade: h2c\r\nconnection: upgrade\r\n", LENGTH, CHUNKED, body=CHUNKS),
    "a folded header": sized(LENGTH, b"x: a\r\n b\r\n"),
    "a folded encoding": sized(b"transfer-encoding:\r\n chunked\r\n", body=CHUNKS),
    "a fold before all headers": LINE + b" x: y\r\n" + HOST + KEYED + LENGTH + b"\r\n" + BODY,
    "bare line feeds": sized(LENGTH).replace(b"\r\n", b"\n"),
    "a bare line feed": sized(LENGTH.replace(b"\r\n", b"\n")),
    "a bare line feed behind the head": LINE + HOST + KEYED + LENGTH + b"\n" + BODY,
    "a bare line feed behind the first line": sized(LENGTH).replace(b"\r\n", b"\n", 1),
    "a bare carriage return": sized(b"x: a\rb: c\r\n", LENGTH),
    "a zero byte in a value": sized(b"x: a\0b\r\n", LENGTH),
    "a zero byte in a name": sized(b"x\0: ab\r\n", LENGTH),
    "a space before the colon": sized(b"content-length : %d\r\n" % len(BODY)),
    "a space before the encoding's colon": sized(b"transfer-encoding : chunked\r\n", body=CHUNKS),
    "no colon": sized(b"xyz\r\n", LENGTH),
    "no name": sized(b": xyz\r\n", LENGTH),
    "two hosts": sized(HOST, LENGTH),
    "a chunk without its end": chunked(SIZE, behind=b"XX"),
    "a chunk with half an end": chunked(SIZE, behind=b"\n"),
    "a chunk that is longer": chunked(b"%x" % (len(BODY) - 1)),
    "a chunk of 0x": chunked(b"0x" + SIZE),
    "a chunk of +": chunked(b"+" + SIZE),
    "a chunk of -": chunked(b"-" + SIZE),
    "a chunk behind a space": chunked(b" " + SIZE),
    "a chunk before a space": chunked(SIZE + b" "),
    "a chunk without a size": chunked(b""),
    "a chunk beyond all numbers": chunked(b"fffffffffffffffff"),
    "a line feed in an extension": chunked(SIZE + b";a\nb"),
    "lines of a chunk that end in line feeds": sized(CHUNKED, body=CHUNKS.replace(b"\r\n", b"\n")),
    "a length in the trailers": chunked(SIZE, last=b"0\r\ncontent-length: 5\r\n\r\n"),
    "two spaces before the path": sized(LENGTH).replace(b" /", b"  /", 1),
    "two spaces behind the path": sized(LENGTH).replace(b" HTTP", b"  HTTP", 1),
    "many spaces behind the path": sized(CHUNKED, body=CHUNKS).replace(b" HTTP", b" " * 300 + b"HTTP", 1),
    "no version": LINE.replace(b" HTTP/1.1", b""),
    "another version": sized(LENGTH).replace(b"HTTP/1.1", b"HTTP/1.2", 1),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT a:80 HTTP/1.1\r\n" + HOST + KEYED + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
}


async def responds(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


async def _refused(port: int, data: bytes, status: int) -> None:
    """Check for one error response and a closed connection, although a valid request follows."""
    async with client(port) as one:
        one.send(data + request())
        reply = await one.reply()
        assert (reply.status, reply.headers["connection"]) == (status, "close"), data[:300]
        async with asyncio.timeout(20):
            assert await one.reader.read() == b"", "what stands behind was answered"


@pytest.mark.row(13)
async def test_ambiguous_framing_is_refused(measured: Callable[[str], None]) -> None:
    async with scripted(responds) as server, unharmed([model(server.port)]) as served:
        await asyncio.gather(*(_refused(served.port, data, 400) for data in AMBIGUOUS.values()))
        assert server.requests == []
        assert served.value("client_faults_total", "malformed") == len(AMBIGUOUS)
        spaces = sized(b"transfer-encoding:  Chunked  \r\n", body=CHUNKS)
        for good in (sized(LENGTH), sized(CHUNKED, body=CHUNKS), spaces, chunked(b"00" + SIZE + b";a=b")):
            assert (await request_once(served.port, good)).status == 200
        assert len(server.requests) == 4
    measured(f"{len(AMBIGUOUS)} of {len(AMBIGUOUS)} cases: 400, connection closed, 0 requests upstream")


async def _refused_behind(port: int, ahead: bytes, count: int, data: bytes, pause: float) -> None:
    """Check for the responses to the requests ahead, in order, then one error response, and a closed connection."""
    async with client(port) as one:
        one.send(ahead)
        await asyncio.sleep(pause)  # in the same read, or in a separate one while the requests ahead are in flight
        one.send(data + request())
        statuses = [(await one.reply()).status for _ in range(count + 1)]
        assert statuses == [200] * count + [400], data[:300]
        async with asyncio.timeout(20):
            assert await one.reader.read() == b"", "what stands behind was answered"


HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
AHEAD = {
    "one request": (request(), 1),
    "three requests": (request() * 3, 3),
    "requests of both kinds": (HEALTH + request() + HEALTH, 3),
}


@pytest.mark.row(13)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("pause", [0, 0.05])
async def test_a_refusal_follows_the_responses_ahead(ahead: str, pause: float, measured: Callable[[str], None]) -> None:
    async def slowly(talk: Conversation) -> None:
        await asyncio.sleep(0.1)
        await responds(talk)

    requests, count = AHEAD[ahead]
    async with scripted(slowly) as server, unharmed([model(server.port)]) as served:
        await asyncio.gather(*(_refused_behind(served.port, requests, count, data, pause) for data in AMBIGUOUS.values()))
        assert len(server.requests) == requests.count(b"POST ") * len(AMBIGUOUS)
        assert served.value("client_faults_total", "malformed") == len(AMBIGUOUS)
    measured(f"{len(AMBIGUOUS)} cases behind {ahead}: those answered, then 400, connection closed")


@pytest.mark.row(13)
@pytest.mark.parametrize("pause", [0, 0.1])
async def test_an_unread_body_is_malformed(pause: float) -> None:
    """The request has a response or will get one. There is no second response."""
    head = (LINE + HOST + CHUNKED + b"\r\n").replace(b"/v1/chat/completions", b"/nowhere")
    async with unharmed([model(1)]) as served:
        for ahead in (b"", HEALTH):
            async with client(served.port) as one:
                one.send(ahead + head)
                await asyncio.sleep(pause)
                one.send(b"zz\r\n" + request())
                assert [(await one.reply()).status for _ in range(2 if ahead else 1)] == [*([200] if ahead else []), 404]
                async with asyncio.timeout(20):
                    assert await one.reader.read() == b"", "a second answer"


@pytest.mark.row(13)
@pytest.mark.parametrize(
    "last",
    [
        request(extra=("connection: close",)),
        HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"),
    ],
    ids=["to be closed", "to be closed, of the other kind", "another protocol"],
)
@pytest.mark.parametrize("pause", [0, 0.05])
async def test_bytes_after_the_last_request_get_no_response(last: bytes, pause: float) -> None:
    async def slowly(talk: Conversation) -> None:
        await asyncio.sleep(0.1)
        await responds(talk)

    async with scripted(slowly) as server, unharmed([model(server.port)]) as served, client(served.port) as one:
        one.send(request() + last)
        await asyncio.sleep(pause)
        one.send(AMBIGUOUS["two lengths"] + request())
        assert [(await one.reply()).status for _ in range(2)] == [200, 200]
        async with asyncio.timeout(20):
            assert await one.reader.read() == b""
        assert len(server.requests) <= 2


@pytest.mark.row(13)
@pytest.mark.parametrize("kind", ["HTTP", "body"])
async def test_a_disconnect_is_noticed_while_a_refusal_waits(kind: str) -> None:
    async def never(talk: Conversation) -> None:
        await talk.closed_by_peer()

    data = AMBIGUOUS["two lengths" if kind == "HTTP" else "a chunk without its end"]
    async with scripted(never) as server, unharmed([model(server.port)]) as served, client(served.port) as one:
        one.send(request() * 2 + data)
        await until(lambda: len(server.requests) == 1)
        one.disconnect()
        await until(lambda: not served.connections and not server.open)
        assert len(server.requests) == 1


@pytest.mark.row(13)
async def test_endless_framing_is_refused(measured: Callable[[str], None]) -> None:
    """A chunk of one byte may have an extension of any length. Many such chunks would be unbounded work."""
    async with scripted(responds) as server, unharmed([model(server.port)]) as served, client(served.port) as one:
        one.send(LINE + HOST + KEYED + CHUNKED + b"\r\n")
        refused = asyncio.create_task(one.reply())
        sent = 0
        while not refused.done():
            one.send(b"1;%b\r\n{\r\n" % (b"a" * 4000))
            sent += 1
            await asyncio.sleep(0.001)
        assert (await refused).status == 431 and sent < 2000
        assert server.requests == []
    measured("one-byte chunks with 4,000 bytes of extension: rejected")


@pytest.mark.row(13)
async def test_a_body_in_chunks_of_one_byte_is_accepted() -> None:
    body = orjson.dumps(chat(user="u" * 30_000))
    data = sized(CHUNKED, body=b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    async with scripted(responds) as server, unharmed([model(server.port)]) as served, client(served.port) as one:
        for at in range(0, len(data), 50_000):
            one.send(data[at : at + 50_000])
            await asyncio.sleep(0.005)
        assert (await one.reply()).status == 200
        assert server.requests[0].json["user"] == "u" * 30_000


@pytest.mark.row(12)
async def test_oversized_headers_are_refused(measured: Callable[[str], None]) -> None:
    oversized = {
        "a header of 64 KiB": request(extra=("x: " + "a" * MAX_HEAD,)),
        "1,000 headers": request(extra=("x: y",) * 1000),
        "a path of 64 KiB": request(path="/" + "a" * MAX_HEAD),
        "a name of 64 KiB": request(extra=("a" * MAX_HEAD + ": x",)),
    }
    async with scripted(responds) as server, unharmed([model(server.port)]) as served:
        await asyncio.gather(*(_refused(served.port, data, 431) for data in oversized.values()))
        assert server.requests == []
    measured(f"{', '.join(oversized)}: 431")


TRAILER = b"x: " + b"a" * 69_000 + b"\r\n"


@pytest.mark.row(12)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/nowhere"])
@pytest.mark.parametrize("cut", [1, 30_000, 10**6])
async def test_oversized_trailers_are_refused(path: bytes, cut: int) -> None:
    """The result does not depend on how the network cuts them or on the bytes that follow."""
    data = chunked(SIZE, last=b"0\r\n" + TRAILER + b"\r\n").replace(b"/v1/chat/completions", path)
    async with scripted(responds) as server, unharmed([model(server.port)]) as served, client(served.port) as one:
        split = data.index(TRAILER) + cut
        one.send(data[:split])
        if split < len(data):
            await asyncio.sleep(0.05)
        one.send(data[split:] + request())
        statuses = [(await one.reply()).status]
        async with asyncio.timeout(20):
            assert await one.reader.read() == b"", "what stands behind was answered"
        assert statuses == [431 if path != b"/nowhere" else 404] and server.requests == []


@pytest.mark.row(12)
async def test_endless_headers_are_not_buffered() -> None:
    async def pour(one: Client) -> None:
        while True:
            one.send(b"x: " + b"a" * 1000 + b"\r\n")
            await one.writer.drain()

    async with unharmed([model(1)]) as served, client(served.port) as one:
        one.send(LINE)
        pouring = asyncio.create_task(pour(one))
        assert (await one.reply()).status == 431
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)


@pytest.mark.row(13)
async def test_a_request_line_is_parsed_alike_wherever_it_is_cut() -> None:
    """The pipelined requests have bodies with lines that look like request lines."""
    text = orjson.dumps(chat(user="POST  /v1/chat/completions HTTP/1.1\r\n"), option=orjson.OPT_INDENT_2)
    text = text.replace(b"{", b"{\n\nPOST  / HTTP/1.1\r\n".replace(b"POST  / HTTP/1.1", b" "), 1)
    good = request(text) + sized(CHUNKED, body=b"%x\r\n%b\r\n0\r\nx: a HTTP/1.1 b\r\n\r\n" % (len(text), text)) + b"\r\n" + request(text)
    bad = sized(LENGTH).replace(b" HTTP", b"  HTTP", 1)
    data = good + bad
    async with scripted(responds) as server, unharmed([model(server.port)]) as served:
        for at in (
            0,
            10,
            45,
            len(request(text)) + 3,
            len(good) - 5,
            len(good) + 2,
            len(good) + 12,
            len(good) + 27,
            len(good) + 33,
            len(data),
        ):
            async with client(served.port) as one:
                one.send(data[:at])
                await asyncio.sleep(0.01)
                one.send(data[at:])
                assert [(await one.reply()).status for _ in range(4)] == [200, 200, 200, 400], at
    assert len(server.requests) == 30


# Comparison with another parser


class Bodies:
    """A worker whose handler stores the body of every request, and responds."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def handle(self, request: ClientRequest) -> None:
        try:
            self.received.append(bytes(await request.body.read()))
            request.respond(200, b"", b"{}")
        except Refusal as refusal:
            request.respond(refusal.spec.status, b"", b"")
        except asyncio.CancelledError:
            pass  # the client has disconnected
        finally:
            request.release()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def bodies() -> Iterator[tuple[Worker, Bodies]]:
    with shared_counters() as counts, live_servers() as servers:
        handler = Bodies()
        context = RequestServices(metrics=WorkerMetrics(counts), log=AccessLog(-1), write_batch=servers.write_batch)
        yield Worker(Snapshot(1, (key(),), (model(1),)), context, handler.handle, fleet=servers), handler


async def taken_by_the_gateway(bodies: tuple[Worker, Bodies], data: bytes, pieces: list[int]) -> list[bytes]:
    worker, handler = bodies
    handler.received = []
    connection = worker.connection()
    connection.connection_made(Wire())
    at = 0
    for size in [*pieces, len(data)]:
        connection.data_received(data[at : at + size])
        await asyncio.sleep(0)  # the next pipelined request starts in a new event-loop iteration
        at += size
    for _ in range(4):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return handler.received


def taken_by_h11(data: bytes) -> list[bytes]:
    """Return the bodies that h11 reads, up to the first request that it does not accept."""
    bodies: list[bytes] = []
    while data := data.lstrip(b"\r\n"):  # blank lines between requests are skipped (RFC 9112, section 2.2)
        connection, body = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), b""
        connection.receive_data(data)
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    return bodies
                if isinstance(event, h11.Data):
                    body += bytes(event.data)
        except h11.RemoteProtocolError:
            return bodies
        bodies.append(body)
        data = connection.trailing_data[0]
    return bodies


FIXED = LINE + HOST + KEYED  # never changed: h11 and the gateway differ in how strict they are about it
HEADERS = st.sampled_from([b"", b"x: y\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"accept: */*\r\naccept: b\r\n"])
BODIES = st.sampled_from([b"{}", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", LINE + HOST + KEYED + b"content-length: 2\r\n\r\n{}", b"a" * 300])
SPLINTERS = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b";", b"0", b"1", b"a", b",", b"+", b"-", b"\0", b"\x0b", b"\xff", b"\r\n\r\n", b"0\r\n\r\n",
     b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"Content-Length: 2\r\n", b"chunked", b"connection: close\r\n"]
)  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a request in two parts: a start that is never changed, and a rest that may be changed."""
    body, more = draw(BODIES), draw(HEADERS)
    if draw(st.booleans()):
        return FIXED, more + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    step = draw(st.integers(1, 40))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + step]), body[at : at + step]) for at in range(0, len(body), step))
    return FIXED, more + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def _changed(data: bytes, at: float, cut: int, splinter: bytes) -> bytes:
    position = int(at * len(data))
    return data[:position] + splinter + data[position + cut :]


CHANGES = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), st.integers(0, 3), SPLINTERS), max_size=3)
PIECES = st.lists(st.integers(1, 400), max_size=6)


@pytest.mark.row(13)
@settings(max_examples=20_000 if FULL else examples(400), deadline=None)
@given(requests=st.lists(parts(), min_size=1, max_size=3), changes=CHANGES, pieces=PIECES)
@example(
    requests=[
        (FIXED, b"upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}"),
        (FIXED, b"transfer-encoding: chunked\r\n\r\n1\r\n0\r\n1\r\n\r\r\n1\r\n\n\r\n1\r\n\r\r\n1\r\n\n\r\n0\r\n\r\n"),
        (FIXED, b"content-length: 2\r\n\r\n{}"),
    ],
    changes=[(0, 0.0, 0, b"connection: close\r\n")],
    pieces=[335],
)
def test_h11_reads_every_dispatched_request(
    runner: asyncio.Runner,
    bodies: tuple[Worker, Bodies],
    requests: list[tuple[bytes, bytes]],
    changes: list[tuple[int, float, int, bytes]],
    pieces: list[int],
) -> None:
    whole = list(requests)
    for number, at, cut, splinter in changes:
        if number < len(whole):
            whole[number] = (whole[number][0], _changed(whole[number][1], at, cut, splinter))
    data = b"".join(fixed + rest for fixed, rest in whole)
    expected, taken = taken_by_h11(data), runner.run(taken_by_the_gateway(bodies, data, pieces))
    assert taken == expected[: len(taken)]
    if not changes:
        assert len(taken) == len(requests)
