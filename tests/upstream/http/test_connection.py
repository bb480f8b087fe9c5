"""A connection carries one exchange at a time and is never used again when anything about it is in doubt."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.certificates import certificate
from tests.support.examples import examples
from tests.support.exchange import ManualWriteBatch
from tests.support.ports import refusing, silent
from tests.support.running import until
from tests.support.scripted import Conversation, Script, Scripted, read_request, scripted
from tests.support.way import Wire
from upstream.http.address import Address
from upstream.http.connection import MAX_HEADER_BYTES, Connection, IdleConnections, connect
from upstream.http.errors import BadResponse, ConnectFailed, ConnectTimeout, Disconnected, StaleConnection, UpstreamError
from upstream.http.response_head import Headers
from upstream.http.write_batching import WriteBatch

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class Taken:
    """A receiver that stores what it receives."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = {}
        self.pieces: list[bytes] = []
        self.whole_chunks = 0
        self.error: UpstreamError | None = None
        self.end_count = 0
        self._ended = asyncio.Event()

    wants_read_events = False

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        assert framed == b"%x\r\n%b\r\n" % (len(data), data)
        self.whole_chunks += 1
        self.on_body(data)

    def on_read(self) -> None:
        raise AssertionError("it did not want to know")

    def on_headers(self, status: int, headers: Headers) -> None:
        assert not self.status, "an answer has one head"
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        assert self.status and not self._ended.is_set()
        self.pieces.append(data)

    def on_end(self) -> None:
        self.end_count += 1
        self._ended.set()

    def on_failure(self, error: UpstreamError) -> None:
        self.error = error
        self.end_count += 1
        self._ended.set()

    def on_writable(self) -> None:
        pass

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    async def finished(self) -> Taken:
        async with asyncio.timeout(10):
            await self._ended.wait()
        assert self.end_count == 1
        return self


@asynccontextmanager
async def connected(server: Scripted) -> AsyncIterator[tuple[Connection, list[Connection]]]:
    idle: list[Connection] = []
    connection = await connect("one", Address(port=server.port), 5.0, None, idle.append, WriteBatch())
    try:
        yield connection, idle
    finally:
        connection.close()


async def send_request(connection: Connection) -> Taken:
    taken = Taken()
    connection.send(REQUEST, taken)
    return await taken.finished()


def says(*segments: bytes, close: bool = False, pause: float = 0.0) -> Script:
    async def script(talk: Conversation) -> None:
        for segment in segments:
            await talk.write(segment)
            await asyncio.sleep(pause)
        if close:
            talk.writer.close()

    return script


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
WHOLE = {
    "a length": (OK, b"ok", True),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", b"ok", True),
    "a trailer": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: y\r\n\r\n", b"ok", True),
    "nothing": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK, b"ok", True),
    "its close announced": (OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), b"ok", False),
    "HTTP/1.0": (OK.replace(b"1.1", b"1.0"), b"ok", False),
    "HTTP/1.0 that stays": (OK.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", b"\r\nconnection: keep-alive\r\n\r\n"), b"ok", True),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("piece", [1, 1000])
async def test_a_complete_response(name: str, piece: int) -> None:
    wire, body, stays = WHOLE[name]
    async with scripted(says(*(wire[at : at + piece] for at in range(0, len(wire), piece)))) as server, connected(server) as (one, idle):
        for number in range(1, 3 if stays else 2):
            taken = await send_request(one)
            assert (taken.error, taken.status, taken.body) == (None, 204 if not body else 200, body)
            assert all(key == key.lower() and key not in (b"link", b"x") for key in taken.headers)
            assert len(idle) == (number if stays else 0)
            assert one.closed is not stays
        assert server.accepted == 1


async def test_a_body_without_length_ends_with_its_connection() -> None:
    script = says(b"HTTP/1.1 200 OK\r\n\r\n", b"some", b"thing", close=True, pause=0.01)
    async with scripted(script) as server, connected(server) as (one, idle):
        taken = await send_request(one)
        assert (taken.error, taken.body, idle) == (None, b"something", [])


async def test_a_body_without_length_that_is_reset_is_not_whole() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await asyncio.sleep(0.02)
        talk.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        talk.writer.transport.abort()

    async with scripted(script) as server, connected(server) as (one, _):
        taken = await send_request(one)
        assert isinstance(taken.error, Disconnected) and taken.body == b"some"


BROKEN = {
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", BadResponse),
    "a bad chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", BadResponse),
    "two framings": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n", BadResponse),
    "two lengths": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok", BadResponse),
    "a switch of protocols": (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", BadResponse),
    "a long head": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * (MAX_HEADER_BYTES + 1), BadResponse),
    "a long head that ends": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n", BadResponse),
    "many headers": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000, BadResponse),
    "a long trailer": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: " + b"a" * 1_000_000, BadResponse),
    "many trailers": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n" + b"x: y\r\n" * 200_000, BadResponse),
    "a long chunk extension": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;" + b"a" * 1_000_000, BadResponse),
    "a line feed in a header": (b"HTTP/1.1 200 OK\r\ncontent-type: a\r\n b\r\n\r\n", BadResponse),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_invalid_response(name: str) -> None:
    wire, kind = BROKEN[name]
    async with scripted(says(wire)) as server, connected(server) as (one, idle):
        taken = await send_request(one)
        assert isinstance(taken.error, kind)
        assert one.closed and not idle
        assert b"evil" not in taken.body


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"garbage", b"\r\n"])
@pytest.mark.parametrize("together", [True, False])
async def test_bytes_behind_a_response_end_the_connection(behind: bytes, together: bool) -> None:
    """The response itself is complete, whether they arrive with it or later. They are never read as a response."""
    script = says(OK + behind) if together else says(OK, behind, pause=0.01)
    async with scripted(script) as server, connected(server) as (one, _):
        taken = await send_request(one)
        assert (taken.error, taken.body) == (None, b"ok")
        await until(lambda: one.closed)


@pytest.mark.parametrize("wire", [b"", b"HT", OK[:-1], b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n"])
async def test_a_connection_that_ends_too_early(wire: bytes) -> None:
    async with scripted(says(wire, close=True)) as server, connected(server) as (one, idle):
        taken = await send_request(one)
        assert type(taken.error) is Disconnected and not idle


@pytest.mark.parametrize("wire", [b"", b"H"])
async def test_the_close_of_a_reused_connection_is_stale(wire: bytes) -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(OK if talk.number == 1 else wire)
        if talk.number == 2:
            talk.writer.close()

    async with scripted(script) as server, connected(server) as (one, _):
        await send_request(one)
        error = (await send_request(one)).error
        assert type(error) is (Disconnected if wire else StaleConnection)
        assert error.untouched is not bool(wire)


async def test_a_reused_connection_that_closes_long_after_the_request_is_not_stale() -> None:
    async def script(talk: Conversation) -> None:
        if talk.number == 1:
            await talk.write(OK)
        else:
            await asyncio.sleep(1.1)
            talk.writer.close()

    async with scripted(script) as server, connected(server) as (one, _):
        await send_request(one)
        assert type((await send_request(one)).error) is Disconnected


async def test_unexpected_bytes_close_an_idle_connection() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(OK)
        await asyncio.sleep(0.05)
        await talk.write(OK.replace(b"ok", b"ev"))

    async with scripted(script) as server:
        idle_connections = IdleConnections(60.0)
        one = await connect("one", Address(port=server.port), 5.0, None, idle_connections.add, WriteBatch())
        await send_request(one)
        assert len(idle_connections) == 1
        await until(lambda: one.closed)
        assert idle_connections.pop() is None


async def test_a_reader_that_pauses_in_the_last_read_gets_the_next_response() -> None:
    class Pausing(Taken):
        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            one.pause_reading()

    async with scripted(says(OK)) as server, connected(server) as (one, idle):
        paused = Pausing()
        one.send(REQUEST, paused)
        await paused.finished()
        assert idle == [one]
        assert (await send_request(one)).body == b"ok"


async def test_its_description_names_the_server_and_the_state() -> None:
    async with scripted(says(OK)) as server, connected(server) as (one, _):
        taken = Taken()
        one.send(REQUEST, taken)
        assert repr(one) == "<Connection to one, busy, 1 uses>"
        await taken.finished()
        assert repr(one) == "<Connection to one, idle, 1 uses>"
        one.close()
        assert repr(one) == "<Connection to one, closed, 1 uses>"


class Diverted(Taken):
    """A receiver whose connection passes its reads to a reader, which stores them and passes them on."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.reads: list[bytes] = []
        self.writable_count = 0

    def on_headers(self, status: int, headers: Headers) -> None:
        super().on_headers(status, headers)
        self.connection.divert_reads(self._read)

    def on_writable(self) -> None:
        self.writable_count += 1

    def _read(self, data: bytes) -> None:
        self.reads.append(data)
        self.connection.data_received(data)


async def test_a_server_that_closes_a_diverted_stream_truncates_its_response() -> None:
    arrived = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await arrived.wait()
        await talk.chunk(b"data: 1\n\n")
        talk.writer.close()

    async with scripted(script) as server, connected(server) as (one, idle):
        taken = Diverted(one)
        one.send(REQUEST, taken)
        await until(lambda: taken.status == 200)
        arrived.set()
        await taken.finished()
        assert (b"".join(taken.reads), taken.body) == (b"9\r\ndata: 1\n\n\r\n", b"data: 1\n\n")
        assert isinstance(taken.error, Disconnected) and "in its response" in str(taken.error)
        assert one.closed and not idle


async def test_a_request_continues_while_the_reads_of_its_response_are_diverted() -> None:
    """The server sends the headers before it has read the request. The next request's response is not diverted."""
    body, may_read = b"x" * (64 << 20), asyncio.Event()

    async def script(talk: Conversation) -> None:
        if talk.number == 2:
            await talk.write(OK)
            return
        await talk.begin_stream()
        await may_read.wait()
        assert await talk.reader.readexactly(len(body)) == body
        await talk.chunk(b"data: 1\n\n")
        await talk.end_stream()

    async with scripted(script) as server, connected(server) as (one, idle):
        taken = Diverted(one)
        one.send(b"POST / HTTP/1.1\r\nhost: x\r\n\r\n", taken, more=True)
        await until(lambda: taken.status == 200)
        one.send_more(body, more=False)
        await until(lambda: one.write_paused)
        assert taken.writable_count == 0
        may_read.set()
        await taken.finished()
        assert taken.writable_count == 1 and not one.write_paused
        assert (taken.error, taken.body, idle) == (None, b"data: 1\n\n", [one])
        reads = len(taken.reads)
        assert (await send_request(one)).body == b"ok"
        assert len(taken.reads) == reads > 0


async def test_an_unfinished_request_ends_its_connection() -> None:
    async with scripted(says(OK)) as server, connected(server) as (one, idle):
        taken = Taken()
        one.send(REQUEST, taken, more=True)
        await taken.finished()
        assert taken.body == b"ok" and taken.error is None
        assert one.closed and not idle


async def test_a_request_that_was_not_taken_ends_its_connection() -> None:
    """The server has answered and does not read on: what would follow might never be read either."""
    finished = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.write(OK)
        await finished.wait()

    async with scripted(script) as server, connected(server) as (one, idle):
        taken = Taken()
        one.send(REQUEST, taken, more=True)
        one.send_more(b"x" * (64 << 20), more=False)
        await taken.finished()
        assert taken.body == b"ok" and taken.error is None
        assert one.closed and not idle
        finished.set()


@pytest.mark.parametrize("refuse", ["port", "socket"])
async def test_what_cannot_be_connected(refuse: str, tmp_path: Path) -> None:
    with refusing() as port:
        address = Address(port=port) if refuse == "port" else Address(uds=str(tmp_path / "none.sock"))
    with pytest.raises(ConnectFailed) as caught:
        await connect("one", address, 5.0, None, lambda _: None, WriteBatch())
    assert caught.value.untouched and caught.value.server == "one"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70, pytest.param("\u00e4" * 70, id="umlauts")])
async def test_a_name_that_means_nothing(host: str) -> None:
    with pytest.raises(ConnectFailed):
        await connect("one", Address(host=host, port=80), 5.0, None, lambda _: None, WriteBatch())


async def test_a_server_that_accepts_nothing() -> None:
    with silent() as port, pytest.raises(ConnectTimeout):
        await connect("one", Address(port=port), 0.2, None, lambda _: None, WriteBatch())


async def test_a_process_that_stood_still_takes_the_connection_that_was_made_meanwhile() -> None:
    async with scripted(says(OK)) as server:
        connecting = asyncio.create_task(connect("one", Address(port=server.port), 0.05, None, lambda _: None, WriteBatch()))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  the whole loop
        one = await connecting
        assert (await send_request(one)).body == b"ok"
        one.close()


async def test_a_unix_socket(tmp_path: Path) -> None:
    path, finished = str(tmp_path / "server.sock"), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await reader.read()
        writer.transport.abort()
        finished.set()

    server = await asyncio.start_unix_server(serve, path)
    async with server:
        one = await connect("one", Address(uds=path), 5.0, None, lambda _: None, WriteBatch())
        assert (await send_request(one)).body == b"ok"
        one.close()
        await finished.wait()
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


async def test_tls_is_checked(pair: tuple[Path, Path]) -> None:
    cert, key = pair
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    talks = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talks
        talks += 1
        try:
            await read_request(reader)
            writer.write(OK)
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            talks -= 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        trusting = ssl.create_default_context(cafile=str(cert))
        one = await connect("one", Address(host="localhost", port=port, tls=True), 5.0, trusting, lambda _: None, WriteBatch())
        assert (await send_request(one)).body == b"ok"
        one.close()
        with pytest.raises(ConnectFailed, match=r"(?i)cert"):  # no trusted authority signed it
            await connect(
                "one", Address(host="localhost", port=port, tls=True), 5.0, ssl.create_default_context(), lambda _: None, WriteBatch()
            )
        with pytest.raises(ConnectFailed, match=r"(?i)cert"):  # it is another's
            await connect("one", Address(host="127.0.0.1", port=port, tls=True), 5.0, trusting, lambda _: None, WriteBatch())
        await until(lambda: talks == 0)
        await asyncio.sleep(0.02)


async def test_no_tls_where_tls_is_expected() -> None:
    async with scripted(says(OK)) as server:
        with pytest.raises(ConnectFailed):
            await connect("one", Address(port=server.port, tls=True), 0.3, ssl.create_default_context(), lambda _: None, WriteBatch())


async def test_parked_connections_are_given_out_while_they_are_good() -> None:
    async with scripted(says(OK)) as server:
        idle_connections = IdleConnections(60.0)
        address = Address(port=server.port)
        one = await connect("one", address, 5.0, None, idle_connections.add, WriteBatch())
        two = await connect("one", address, 5.0, None, idle_connections.add, WriteBatch())
        await send_request(one)
        await send_request(two)
        assert idle_connections.pop() is two, "the one used last"
        idle_connections.add(two)
        one.close()
        assert idle_connections.pop() is two
        assert idle_connections.pop() is None, "a closed one is not given out"
        idle_connections.add(two)
        idle_connections.max_idle = 0.01
        await asyncio.sleep(0.02)
        assert idle_connections.pop() is None and two.closed, "one that waited too long is closed"
        idle_connections.max_idle = 60.0
        three = await connect("one", address, 5.0, None, idle_connections.add, WriteBatch())
        await send_request(three)
        idle_connections.close_expired()
        assert len(idle_connections) == 1
        await until(lambda: server.open == 1)
        idle_connections.max_idle = 0.01
        await asyncio.sleep(0.02)
        idle_connections.close_expired()
        assert len(idle_connections) == 0 and three.closed
        await until(lambda: server.open == 0)


# Repeated responses

HEAD = b"HTTP/1.1 200 OK\r\ndate: 1\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n"
REPEATED = HEAD + b"{}"
ALMOST = {
    "another length": HEAD.replace(b": 2\r\nc", b": 12\r\nc") + b'{"a": "bcd"}',
    "no body": HEAD.replace(b": 2\r\nc", b": 0\r\nc"),
    "another date": REPEATED.replace(b"date: 1", b"date: 2"),
    "another status": REPEATED.replace(b"200 OK", b"201 OK"),
    "an error": REPEATED.replace(b"200 OK", b"500 No"),
    "another type": REPEATED.replace(b"application/json", b"text/plain"),
    "another header": REPEATED.replace(b"date", b"x: y\r\ndate"),
    "its close announced": REPEATED.replace(b"date", b"connection: close\r\ndate"),
    "chunks": HEAD.replace(b"content-length: 2", b"transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
    "both framings": HEAD.replace(b"date", b"transfer-encoding: chunked\r\ndate") + b"{}",
    "two lengths": REPEATED.replace(b"date", b"content-length: 2\r\ndate"),
    "a length with a plus": REPEATED.replace(b": 2\r\nc", b": +2\r\nc"),
    "a length behind zeros": REPEATED.replace(b": 2\r\nc", b": 002\r\nc"),
    "a length with a space": REPEATED.replace(b": 2\r\nc", b": 2 \r\nc"),
    "a negative length": REPEATED.replace(b": 2\r\nc", b": -2\r\nc"),
    "a longer length": REPEATED.replace(b": 2\r\nc", b": 3\r\nc"),
    "a shorter length": REPEATED.replace(b": 2\r\nc", b": 1\r\nc"),
    "another response behind it": REPEATED * 2,
    "half of another behind it": REPEATED + b"HTT",
    "an interim response before it": b"HTTP/1.1 100 Continue\r\n\r\n" + REPEATED,
    "not HTTP": b"nothing",
}


class Exchanges:
    """A connection to a fake transport, and the parsed results of its responses."""

    def __init__(self) -> None:
        self.idle_count = 0
        self.batch, self.wire = ManualWriteBatch(math.inf), Wire()
        self.connection = Connection("one", self._on_idle, self.batch)
        self.connection.connection_made(self.wire)

    def _on_idle(self, _: Connection) -> None:
        self.idle_count += 1

    def receive(self, *reads: bytes) -> tuple[object, ...]:
        taken, before = Taken(), self.idle_count
        self.connection.send(REQUEST, taken)
        for read in reads:
            self.connection.data_received(read)
        return taken.status, taken.headers, taken.body, str(taken.error), taken.end_count, self.idle_count - before, self.connection.closed


def test_an_interim_response_does_not_frame_the_next_one() -> None:
    """It has no body, whatever its headers say."""
    exchanges = Exchanges()
    wire = b"HTTP/1.1 103 Early Hints\r\ncontent-length: %d\r\n\r\n%b" % (len(REPEATED), REPEATED)
    assert exchanges.receive(wire) == exchanges.receive(wire) == Exchanges().receive(REPEATED)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([REPEATED, *ALMOST.values()]), st.booleans()), min_size=2, max_size=12))
def test_a_response_does_not_depend_on_earlier_ones(responses: list[tuple[bytes, bool]]) -> None:
    async def run() -> None:
        exchanges = Exchanges()
        for data, in_two_reads in responses:
            reads = (data[:50], data[50:]) if in_two_reads and len(data) > 50 else (data,)
            expected = Exchanges().receive(*reads)
            assert exchanges.receive(*reads) == expected
            if exchanges.connection.closed or not expected[4]:
                exchanges = Exchanges()

    asyncio.run(run())


# One exchange from its start to its end


def test_a_reused_connection_that_closes_before_a_byte_was_stale() -> None:
    for earlier, kind in ((1, StaleConnection), (0, Disconnected)):
        exchanges, taken = Exchanges(), Taken()
        for _ in range(earlier):
            exchanges.receive(REPEATED)
        exchanges.connection.send(REQUEST, taken)
        exchanges.connection.connection_lost(None)
        assert type(taken.error) is kind


def test_a_connection_is_closed_if_none_may_be_idle() -> None:
    for seconds in (0.0, 60.0):
        exchanges, idle = Exchanges(), IdleConnections(seconds)
        idle.add(exchanges.connection)
        assert exchanges.connection.closed == (not seconds) and len(idle) == bool(seconds)


def test_an_urgent_request_is_sent_at_once() -> None:
    exchanges = Exchanges()
    exchanges.batch.batching = True
    exchanges.connection.send(REQUEST, Taken(), at_once=True)
    assert exchanges.wire.written == [REQUEST]


class Reads(Taken):
    """A receiver that counts reads."""

    wants_read_events = True
    reads = 0

    def on_read(self) -> None:
        self.reads += 1


def test_a_receiver_gets_the_end_of_each_read_but_the_last() -> None:
    exchanges, taken = Exchanges(), Reads()
    exchanges.connection.send(REQUEST, taken)
    for read in (REPEATED[:5], REPEATED[5:-1], REPEATED[-1:]):
        exchanges.connection.data_received(read)
    assert (taken.reads, taken.end_count) == (2, 1)


def test_a_lost_connection_is_closed_and_writes_nothing() -> None:
    exchanges, taken = Exchanges(), Taken()
    exchanges.batch.batching = True
    exchanges.connection.send(REQUEST, taken)
    exchanges.connection.connection_lost(None)
    exchanges.batch.flush()
    assert exchanges.connection.closed and exchanges.wire.written == []


def head_of(size: int) -> bytes:
    start = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: "
    return start + b"y" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("before", [(), (REPEATED,)], ids=["the first response", "a later response"])
def test_the_bound_of_headers(before: tuple[bytes, ...], pieces: int) -> None:
    for size in (MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1):
        exchanges = Exchanges()
        for data in before:
            exchanges.receive(data)
        data = head_of(size)
        status, *_ = exchanges.receive(*([data] if pieces == 1 else [data[: len(data) // 2], data[len(data) // 2 :]]))
        assert status == (200 if size == MAX_HEADER_BYTES else 0)


def test_incomplete_headers_are_refused_beyond_the_bound() -> None:
    exchanges, taken, data = Exchanges(), Taken(), head_of(MAX_HEADER_BYTES + 10)
    exchanges.connection.send(REQUEST, taken)
    exchanges.connection.data_received(data[:MAX_HEADER_BYTES])
    assert taken.error is None
    exchanges.connection.data_received(data[MAX_HEADER_BYTES : MAX_HEADER_BYTES + 1])
    assert isinstance(taken.error, BadResponse)


def test_interim_responses_count_towards_the_bound() -> None:
    exchanges, taken = Exchanges(), Taken()
    exchanges.connection.send(REQUEST, taken)
    early = b"HTTP/1.1 103 Early Hints\r\nlink: %b\r\n\r\n" % (b"x" * 1000)
    for _ in range(MAX_HEADER_BYTES // len(early)):
        exchanges.connection.data_received(early)
    assert taken.error is None
    exchanges.connection.data_received(early)
    assert isinstance(taken.error, BadResponse)


# The property: each gets its own answer, whatever others do


def _response(number: bytes, dice: random.Random) -> list[bytes]:
    """An answer to request ``number``, in a random framing and cut at random; sometimes a hostile one."""
    body = number * dice.choice([1, 7, 400])
    if dice.random() < 0.5:
        wire = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: text/plain\r\n\r\n%b" % (len(body), body)
    else:
        half = dice.randrange(len(body) + 1)
        chunks = [chunk for chunk in (body[:half], body[half:]) if chunk]
        wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        wire += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    at, pieces = 0, []
    while at < len(wire):
        size = dice.choice([1, 3, 50, 5000])
        pieces.append(wire[at : at + size])
        at += size
    if len(pieces) > 60:
        pieces = [wire]
    if dice.random() < 0.1:
        pieces[-1] += b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    return pieces


@settings(max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_request_gets_its_own_response(seed: int) -> None:
    dice = random.Random(seed)

    async def script(talk: Conversation) -> None:
        for piece in _response(talk.request.body, dice):
            await talk.write(piece)
            if dice.random() < 0.3:
                await asyncio.sleep(0)

    async def one(idle_connections: IdleConnections, address: Address, number: int) -> int:
        connection = idle_connections.pop() or await connect("one", address, 10.0, None, idle_connections.add, WriteBatch())
        taken, body = Taken(), b"<%d>" % number
        connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body), taken)
        try:
            async with asyncio.timeout(dice.choice([0.001, 0.003, 10, 10, 10])):
                await taken.finished()
        except TimeoutError:
            connection.close()
        assert taken.body == (body * 400)[: len(taken.body)], "another's bytes"
        if taken.end_count and taken.error is None:
            assert len(taken.body) in (len(body), 7 * len(body), 400 * len(body))
            return 1
        return 0

    async def run() -> None:
        async with scripted(script) as server:
            idle_connections = IdleConnections(60.0)
            address, whole = Address(port=server.port), 0
            for index in range(6):
                whole += sum(await asyncio.gather(*(one(idle_connections, address, 100 * index + n) for n in range(8))))
            assert whole > 0
            idle_connections.close_all()
            await until(lambda: server.open == 0)

    asyncio.run(run())


async def test_a_cancelled_connect_leaves_no_connection() -> None:
    async with scripted(says(OK)) as server:
        dice = random.Random(1)
        for _ in range(60):
            task = asyncio.create_task(connect("one", Address(port=server.port), 5.0, None, lambda _: None, WriteBatch()))
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(done, Connection):
                done.close()
        await asyncio.sleep(0.02)
        await until(lambda: server.open == 0)
