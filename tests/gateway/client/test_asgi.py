"""Routes that an ASGI application serves: what reaches it, and what becomes of the responses that it sends, or does not send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.client.connection_context import Message
from tests.gateway.client.test_connection import lazy, only
from tests.support.running import Served, model, serving, until
from tests.support.wire import Client, client

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
GET = b"GET /a%20b?c=d HTTP/1.1\r\nhost: test\r\nX-Twice: 1\r\nx-twice: 2\r\n\r\n"
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/plain")]}


def sized(length: int, **more: Any) -> Message:
    return {**START, "headers": [(b"content-length", b"%d" % length)], **more}


def part(body: bytes, *, last: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


@asynccontextmanager
async def application(run: Callable[[Message, Receive, Send], Awaitable[None]]) -> AsyncIterator[tuple[Served, Client]]:
    """Serve an application on every route that is not inference, and connect a client."""
    async with serving([model(1)]) as served:
        served.worker.connections.other_routes = run
        async with client(served.port) as one:
            yield served, one


def sends(*messages: Message) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    async def run(_: Message, __: Receive, send: Send) -> None:
        for message in messages:
            await send(dict(message))

    return run


async def test_the_scope_describes_the_request() -> None:
    scopes = []

    async def run(scope: Message, _: Receive, send: Send) -> None:
        scopes.append(scope)
        await send({**START, "status": 204})
        await send(part(b""))

    async with application(run) as (served, one):
        assert (await one.request(GET)).status == 204
        (scope,) = scopes
        assert scope.pop("client")[0] == "127.0.0.1" and scope.pop("server") == ("127.0.0.1", served.port)
        assert scope == {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http", "method": "GET",
            "root_path": "", "path": "/a b", "raw_path": b"/a%20b", "query_string": b"c=d", "state": {},
            "headers": [(b"host", b"test"), (b"x-twice", b"1"), (b"x-twice", b"2")],
        }  # fmt: skip


async def test_a_client_on_a_unix_socket_has_no_address(tmp_path: Path) -> None:
    scopes = []

    async def run(scope: Message, _: Receive, send: Send) -> None:
        scopes.append(scope)
        await sends(sized(2), part(b"ok"))(scope, _, send)

    path = str(tmp_path / "socket")
    async with serving([model(1)]) as served:
        served.worker.connections.other_routes = run
        async with await asyncio.get_running_loop().create_unix_server(served.worker.connection, path):
            one = Client(*await asyncio.open_unix_connection(path))
            assert (await one.request(GET)).body == b"ok"
            one.disconnect()
            await until(lambda: not served.connections)
    assert (scopes[0]["client"], scopes[0]["server"]) == (None, (path, None))


@pytest.mark.parametrize("target", [b"http://test/health", b"test:80", b"/\xe4", b"/\x7f", b"?a"])
async def test_a_target_that_is_not_a_path_is_refused(target: bytes) -> None:
    async with serving([model(1)]) as served, client(served.port) as one:
        reply = await one.request(GET.replace(b"/a%20b?c=d", target))
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (400, "invalid_request", "close")


async def test_a_response_without_a_length_is_chunked() -> None:
    async with application(sends(START, part(b"ab", last=False), part(b"", last=False), part(b"c"))) as (_, one):
        for _ in range(2):
            one.send(GET)
            head = await one.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ") and head.endswith(b"\r\ntransfer-encoding: chunked\r\n\r\n")
            assert await one.reader.readuntil(b"0\r\n\r\n") == b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


async def test_an_old_client_reads_up_to_the_end_of_the_connection() -> None:
    async with application(sends(START, part(b"ab", last=False), part(b"c"))) as (_, one):
        one.send(GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await one.reader.read()).partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head and b"transfer-encoding" not in head
        assert body == b"abc"


@pytest.mark.parametrize(
    ("method", "messages"), [(b"HEAD", (sized(3), part(b"abc"))), (b"GET", (sized(0, status=304, headers=[]), part(b"")))]
)
async def test_some_responses_have_no_body(method: bytes, messages: tuple[Message, ...]) -> None:
    async with application(sends(*messages)) as (_, one):
        for _ in range(2):
            one.send(GET.replace(b"GET", method))
            head = await one.reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding" not in head and (b"content-length: 3" in head) == (method == b"HEAD")


# Bodies, and clients that disconnect


@pytest.mark.parametrize(
    "target", [b"/sign-in", b"/sign-in?a=/x", b"/sign-in#a", b"/sign-in#a?b", b"/portal/v1/keys?a#b", b"/x?/sign-in", b"/x#/sign-in"]
)
async def test_the_body_is_stored_for_the_path_that_is_routed(target: bytes) -> None:
    """One parser decides about the path, also of a target with a fragment, which no client should send."""
    found: list[tuple[bytes, bytes]] = []

    async def run(scope: Message, receive: Receive, send: Send) -> None:
        found.append((scope["raw_path"], (await receive())["body"]))
        await send(sized(2))
        await send(part(b"ok"))

    async with application(run) as (_, one):
        reply = await one.request(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc" % target)
        assert reply.body == b"ok"
        [(path, body)] = found
        assert body == (b"" if path == b"/x" else b"abc")


async def test_a_body_is_received_and_discarded() -> None:
    received = []

    async def run(_: Message, receive: Receive, send: Send) -> None:
        received.append(await receive())
        await send(sized(2))
        await send(part(b"ok"))
        received.append(await receive())

    async with application(run) as (_, one):
        one.send(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n" + b"x" * 99_999)
        await asyncio.sleep(0.01)
        assert received == [], "the body is not complete"
        one.send(b"x" + GET)
        assert [(await one.reply()).body for _ in range(2)] == [b"ok", b"ok"]
        await until(lambda: len(received) == 4)
        assert received[:2] == [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]


async def test_an_application_learns_of_a_disconnect() -> None:
    received = []

    async def run(_: Message, receive: Receive, send: Send) -> None:
        await send(START)
        await send(part(b"a", last=False))
        received.extend([await receive(), await receive()])
        await send(part(b"nothing is written any more"))

    async with application(run) as (served, one):
        one.send(GET)
        await one.reader.readuntil(b"1\r\na\r\n")
        one.disconnect()
        await until(lambda: not served.worker.connections.handlers and not served.connections)
        assert [each["type"] for each in received] == ["http.request", "http.disconnect"]


async def test_an_application_waits_for_a_slow_client() -> None:
    sent, finished = 0, False

    async def run(_: Message, __: Receive, send: Send) -> None:
        nonlocal sent, finished
        await send(START)
        while sent < 8 << 20:
            await send(part(b"x" * 65536, last=False))
            sent += 65536
        await send(part(b""))
        finished = True

    async with serving([model(1)]) as served, lazy(served) as (one, connection):
        served.worker.connections.other_routes = run
        one.send(GET)
        await until(lambda: connection.flow.write_paused)
        assert sent < 8 << 20 and not finished
        one.writer.transport.resume_reading()  # type: ignore[attr-defined]  # every transport here reads
        assert len((await one.reply()).body) == 8 << 20
        assert finished


async def test_an_application_that_waits_for_a_slow_client_resumes_when_it_disconnects() -> None:
    async def run(scope: Message, receive: Receive, send: Send) -> None:
        await send(START)
        for _number in range(1 << 10):
            await send(part(b"x" * 65536, last=False))
        await send(part(b""))

    async with serving([model(1)]) as served, lazy(served) as (one, connection):
        served.worker.connections.other_routes = run
        one.send(GET)
        await until(lambda: connection.flow.write_paused)
        one.disconnect()
        await until(lambda: not served.worker.connections.handlers)


# Applications that fail


async def _raises(_: Message, __: Receive, ___: Send) -> None:
    raise ValueError


async def _raises_after_the_start(_: Message, __: Receive, send: Send) -> None:
    await send(START)
    raise ValueError


FAILING = {
    "sends nothing": sends(),
    "sends no body": sends(sized(3)),
    "raises": _raises,
    "raises before the body": _raises_after_the_start,
    "sends a body first": sends(part(b"a")),
    "starts twice": sends(START, START),
    "sends an unknown message": sends({"type": "http.response.trailers"}),
    "sends a name with a colon": sends(sized(0, headers=[(b"a:b", b"c")]), part(b"")),
    "sends a value with a line feed": sends(sized(0, headers=[(b"a", b"b\nc: d")]), part(b"")),
    "sends more than its length": sends(sized(2), part(b"abc")),
    "sends less than its length": sends(sized(2), part(b"a")),
}


@pytest.mark.parametrize("run", FAILING.values(), ids=FAILING.keys())
async def test_an_application_that_fails_before_its_response_gets_500(run: Any) -> None:
    async with application(run) as (served, one):
        reply = await one.request(GET)
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (500, "internal_error", "close")
        assert await one.closed()
        await until(lambda: not served.worker.connections.handlers)


async def test_the_error_of_a_head_request_has_no_body() -> None:
    async with application(_raises) as (_, one):
        one.send(GET.replace(b"GET", b"HEAD"))
        head, _, body = (await one.reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ") and body == b""


async def _raises_in_the_body(_: Message, __: Receive, send: Send) -> None:
    await send(START)
    await send(part(b"a", last=False))
    raise ValueError


CUT = {
    "raises": _raises_in_the_body,
    "stops": sends(START, part(b"a", last=False)),
    "sends more than its length": sends(sized(2), part(b"a", last=False), part(b"bc")),
    "sends less than its length": sends(sized(3), part(b"a", last=False), part(b"b")),
}


@pytest.mark.parametrize("run", CUT.values(), ids=CUT.keys())
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_an_application_that_fails_in_its_response_does_not_seem_to_be_finished(run: Any, version: bytes) -> None:
    async with application(run) as (served, one):
        one.send(GET.replace(b"HTTP/1.1", version))
        data = b""
        try:
            data = await one.reader.read()
        except ConnectionResetError:
            assert version == b"HTTP/1.0", "to this client the end of the connection is the end of the body"
        else:
            assert version == b"HTTP/1.1" and not data.endswith(b"0\r\n\r\n")
        await until(lambda: not served.worker.connections.handlers and not served.connections)


async def test_an_error_behind_the_response_changes_nothing() -> None:
    async def run(_: Message, __: Receive, send: Send) -> None:
        await send(sized(2))
        await send(part(b"ok"))
        await send(part(b"more"))

    async with application(run) as (_, one):
        for _ in range(2):
            assert (await one.request(GET)).body == b"ok"


async def test_an_application_that_is_cancelled_gets_503() -> None:
    async def run(_: Message, receive: Receive, __: Send) -> None:
        while True:
            await receive()

    async with application(run) as (served, one):
        one.send(GET)
        await until(lambda: only(served).current is not None and not only(served).is_idle)
        await asyncio.sleep(0)
        for handler in tuple(served.worker.connections.handlers):
            handler.cancel()
        assert (await one.reply()).status == 503
        assert await one.closed()


async def test_an_application_can_close_the_connection() -> None:
    start = {**START, "headers": [(b"content-length", b"2"), (b"Connection", b"Close")]}
    async with application(sends(start, part(b"ok"))) as (_, one):
        one.send(GET)
        head, _, body = (await one.reader.read()).partition(b"\r\n\r\n")
        assert body == b"ok" and head.lower().count(b"\r\nconnection: close") == 1


async def test_a_drain_leaves_a_complete_response_as_it_is() -> None:
    """The application continues after its response."""
    stopped = asyncio.Event()

    async def run(scope: Message, receive: Receive, send: Send) -> None:
        await sends(sized(2), part(b"ok"))(scope, receive, send)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with application(run) as (served, one):
        assert (await one.request(GET)).body == b"ok"
        for handler in tuple(served.inline_tasks):
            handler.cancel()
        await stopped.wait()
        assert (await one.request(GET)).body == b"ok"


async def test_a_connection_that_is_to_close_does_so_after_the_rest_of_the_body() -> None:
    async with application(sends(sized(2), part(b"ok"))) as (_, one):
        one.send(GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nconnection: close\r\ncontent-length: 10\r\n\r\n12345"))
        reply = await one.reply()
        assert (reply.body, reply.headers["connection"]) == (b"ok", "close")
        one.send(b"67890")
        async with asyncio.timeout(30):
            assert await one.closed()
