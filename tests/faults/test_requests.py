"""Requests with forbidden paths, hosts, keys and headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import psutil
import pytest

from gateway.api.routes import ROUTES, Body
from gateway.auth.jwks import verification_keys
from gateway.snapshot.snapshot import Claims, Key
from gateway.snapshot.snapshot import Issuer as Trusted
from gateway.telemetry.metrics import sum_series
from tests.faults.conftest import FULL
from tests.faults.invariants import unharmed
from tests.support.issuer import AUDIENCE, Issuer
from tests.support.running import KEY, Served, key, model
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, EVENTS, Reply, chat, client, request, request_once


async def _respond(talk: Conversation) -> None:
    """Respond with headers that are private to the server."""
    if b'"stream":true' in talk.request.body:
        await talk.write(b"HTTP/1.1 200 OK\r\n" + _OWN + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in EVENTS:
            await talk.chunk(event)
        await talk.end_stream()
        return
    await talk.write(
        b"HTTP/1.1 200 OK\r\n" + _OWN + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(COMPLETION) + COMPLETION
    )


_OWN = b"server: uvicorn\r\nset-cookie: a=b\r\nx-inside: 10.0.0.7\r\nkeep-alive: timeout=5\r\naccess-control-allow-origin: *\r\n"


@asynccontextmanager
async def _served(keys: Sequence[Key] = (), issuers: Sequence[Trusted] = ()) -> AsyncIterator[tuple[Served, Scripted]]:
    async with scripted(_respond) as server, unharmed([model(server.port, mounts=("/i/1",))], keys, issuers=tuple(issuers)) as served:
        yield served, server


def _bytes(path: bytes, *lines: bytes, method: bytes = b"POST", host: bytes | None = b"host: test", body: bytes | None = None) -> bytes:
    data = request()[request().index(b"\r\n\r\n") + 4 :] if body is None else body
    head = [method + b" " + path + b" HTTP/1.1", *([host] if host is not None else []), b"authorization: Bearer " + KEY.encode()]
    return b"\r\n".join([*head, *lines, b"content-type: application/json", b"content-length: %d" % len(data), b"", b""]) + data


PATHS = [
    b"/v1/../pause",
    b"/v1/chat/completions/../../pause",
    b"/v1/./chat/completions",
    b"/%2e%2e/pause",
    b"/v1/%2e%2e/pause",
    b"/v1%2Fchat%2Fcompletions",
    b"/v1/chat%2fcompletions",
    b"/v1/chat/completion%73",
    b"//v1/chat/completions",
    b"/v1//chat/completions",
    b"/v1/chat/completions//",
    b"/v1/chat/completions%00",
    b"/v1/chat/completions;x=1",
    b"/v1/chat/completions#x",
    b"/V1/chat/completions",
    b"/i/1/../../pause",
    b"/i/1//v1/chat/completions",
    b"/i/2/v1/chat/completions",
    b"/pause",
    b"/invocations",
    b"/metrics",
    b"/load",
    b"/docs",
    b"/sleep",
    b"/v1/load_lora_adapter",
    b"/collective_rpc",
    b"/inference/v1/generate",
    b"/scale_elastic_ep",
    b"/v1/responses/resp_1",
    b"/v1/responses/resp_1/cancel",
    b"/v1/models/../../pause",
    b"/v1/models/%2e%2e%2f%2e%2e%2fpause",
    b"http://127.0.0.1:1/v1/chat/completions",
    b"http://evil.example.com/v1/chat/completions",
    b"https://test/pause",
    b"*",
    b"\\v1\\chat\\completions",
    b"/v1/chat/completions\\..\\pause",
    b"/\xff\xfe",
    b"/v1/chat/completions\xc0\xaf",
    b"/" + b"a" * 60_000,
]


@pytest.mark.row(17)
async def test_only_the_paths_of_the_table_are_served(measured: Callable[[str], None]) -> None:
    async with _served() as (served, server):
        for path in PATHS:
            for method in (b"POST", b"GET", b"PUT", b"CONNECT"):
                reply = await request_once(served.port, _bytes(path, method=method))
                assert reply.status in (400, 404, 405, 431), (path, method, reply.status)
                assert b"error" in reply.body and reply.headers["x-request-id"].startswith("req_")
        assert server.requests == []
    measured(f"{len(PATHS)} paths, 4 methods: 400, 404 or 405, no request reached a server")


BAD_HOSTS = [
    None,
    b"host:",
    b"host: ",
    b"host: [::1",
    b"host: ]",
    b"host: a/v1/messages?",
    b"host: evil/../x",
    b"host: evil.example.com/pause#",
    b"host: user@evil.example.com:99999",
    b"host: test:port",
    b"host: \xff\xfe",
    b"host: a b",
    b"host: a\tb",
    b"host: " + b"a" * 10_000,
    b"host: a\r\nhost: b",
    b"host: a\r\nhost: a",
]
STRANGE_HOSTS = [b"host: evil.example.com", b"host: [::1]:80", b"host: 127.0.0.1:1", b"host: %2e%2e%2fpause", b"HOST: a:"]


@pytest.mark.row(17)
async def test_the_host_has_no_effect(measured: Callable[[str], None]) -> None:
    """An invalid host is rejected (RFC 9112, section 3.2). With any valid host, only the path matters."""
    async with _served() as (served, server):
        for host in (*BAD_HOSTS, *STRANGE_HOSTS):
            statuses = {b"/pause": 404, b"/v1/models": 200, b"/health": 200}
            for path, status in statuses.items():
                reply = await request_once(served.port, _bytes(path, host=host, method=b"GET", body=b""))
                assert reply.status == (400 if host in BAD_HOSTS else status), (host, path, reply.status)
                assert reply.status == 200 or reply.error["type"] == "invalid_request_error", "in OpenAI's shape in any case"
            reply = await request_once(served.port, _bytes(b"/v1/chat/completions", host=host))
            assert reply.status == (400 if host in BAD_HOSTS else 200), host
        assert len(server.requests) == len(STRANGE_HOSTS)
        assert all(b"evil" not in each.head and b"/pause" not in each.head for each in server.requests)
    measured(f"{len(BAD_HOSTS)} invalid ones: 400 on every route; {len(STRANGE_HOSTS)} unusual ones: only the path matters")


# Keys

EXPIRED, FOREIGN = "sk-an-expired-key", "sk-a-key-for-another-model"
ISSUER = Issuer()
TRUSTED = Trusted(ISSUER.name, (AUDIENCE,), ("staff",), ("ES256",), verification_keys(ISSUER.document), Claims(models="models"))
KEYS = [Key("staff"), key(), key("late", EXPIRED, expires=time.time() - 60), key("other", FOREIGN, models=("something-else",))]


def _with(token: str | None) -> list[bytes]:
    return [] if token is None else [b"authorization: Bearer " + token.encode()]


def _request_bytes(method: bytes, path: bytes, lines: Sequence[bytes], body: bytes, kind: bytes) -> bytes:
    head = [method + b" " + path + b" HTTP/1.1", b"host: test", *lines, b"content-type: " + kind, b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"", b""]) + body


FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--\r\n'
SHOWN: dict[str, tuple[list[bytes], int]] = {
    "no key": ([], 401),
    "an empty one": ([b"authorization: Bearer "], 401),
    "a bad one": (_with("sk-nobody"), 401),
    "another scheme": ([b"authorization: Basic " + KEY.encode()], 401),
    "no scheme": ([b"authorization: " + KEY.encode()], 401),
    "in a cookie": ([b"cookie: authorization=Bearer " + KEY.encode()], 401),
    "in another header": ([b"proxy-authorization: Bearer " + KEY.encode(), b"api-key: " + KEY.encode()], 401),
    "in capitals": (_with(KEY.upper()), 401),
    "with something behind it": (_with(KEY + " x"), 401),
    "its hash": (_with(key().digests[0].hex()), 401),
    "two, one of them good": ([*_with("sk-nobody"), *_with(KEY)], 400),
    "an expired one": (_with(EXPIRED), 401),
    "one for other models": (_with(FOREIGN), 404),
    "a token for another audience": (_with(ISSUER.token(aud="another")), 401),
    "a token that is over": (_with(ISSUER.token(exp=1)), 401),
    "a token of somebody else": (_with(Issuer().token()), 401),
    "a token for other models": (_with(ISSUER.token(models="something-else")), 404),
}


@pytest.mark.row(18)
async def test_every_route_requires_a_key(measured: Callable[[str], None]) -> None:
    async with _served(KEYS, [TRUSTED]) as (served, server):
        count = 0
        for prefix in (b"", b"/i/1"):
            for path, route in ROUTES.items():
                form = route.body is Body.FORM
                body, kind = (FORM, b"multipart/form-data; boundary=b") if form else (b'{"model":"tiny"}', b"application/json")
                for name, (lines, status) in SHOWN.items():
                    for query in (b"", b"?api_key=" + KEY.encode()):
                        reply = await request_once(served.port, _request_bytes(b"POST", prefix + path.encode() + query, lines, body, kind))
                        assert reply.status == status, (path, name)
                        assert (status != 401) or reply.headers["www-authenticate"] == "Bearer"
                        count += 1
            for listed in (b"/v1/models", b"/v1/models/tiny"):
                for name, (lines, status) in SHOWN.items():
                    if status == 400:
                        continue  # Starlette uses the first of two headers, which gives access to nothing else
                    reply = await request_once(served.port, _request_bytes(b"GET", prefix + listed, lines, b"", b"text/plain"))
                    assert reply.status == (200 if status == 404 and listed.endswith(b"models") else status), (listed, name)
                    assert b"tiny" not in reply.body or reply.status == 404
                    count += 1
        assert server.requests == []
    measured(f"{count} requests on every route: 401, 404, or 400 for two keys; no request reached a server")


@pytest.mark.row(18)
@pytest.mark.parametrize("token", [KEY, ISSUER.token()], ids=["key", "token"])
async def test_a_good_key_opens_every_route(token: str) -> None:
    """Without this check, the other test would pass if no route existed."""
    async with _served(KEYS, [TRUSTED]) as (served, server):
        for path, route in ROUTES.items():
            form = route.body is Body.FORM
            body, kind = (
                (FORM, b"multipart/form-data; boundary=b") if form else (request()[request().index(b"\r\n\r\n") + 4 :], b"application/json")
            )
            reply = await request_once(served.port, _request_bytes(b"POST", path.encode(), _with(token), body, kind))
            assert reply.status == 200, path
        assert len(server.requests) == len(ROUTES)


# Headers

SMUGGLED = [
    b"connection: close, x-data-parallel-rank",
    b"connection: upgrade",
    b"upgrade: h2c",
    b"http2-settings: AAMAAABkAAQAAP__",
    b"keep-alive: timeout=999",
    b"proxy-connection: keep-alive",
    b"te: trailers",
    b"trailer: x-priority",
    b"cookie: session=canary",
    b"x-data-parallel-rank: 7",
    b"x-vllm-priority: -99",
    b"x-session-id: canary",
    b"x-forwarded-for: 10.0.0.7",
    b"x-forwarded-host: evil",
    b"forwarded: for=10.0.0.7",
    b"x-real-ip: 10.0.0.7",
    b"x-request-id: canary",
    b"request-id: canary",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"x-api-key: canary",
    b"openai-organization: canary",
    b"accept: text/canary",
    b"accept-encoding: gzip, canary",
    b"user-agent: canary",
    b"origin: http://canary",
    b"expect: 100-continue",
    b"content-encoding: identity",
    b"range: bytes=0-1",
    b"x-http-method-override: DELETE",
    b"x-original-url: /pause",
    b"x-rewrite-url: /pause",
]
TO_SERVER = {b"host", b"content-type", b"content-length", b"x-request-id", b"accept", b"authorization"}
TO_CLIENT = {"content-type", "content-length", "transfer-encoding", "x-request-id", "date", "connection", "cache-control"}


def _names(head: bytes) -> set[bytes]:
    return {line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]}


@pytest.mark.row(19)
async def test_only_named_headers_pass(measured: Callable[[str], None]) -> None:
    async with _served() as (served, server):
        path = b"/v1/chat/completions"
        body = request(chat(stream=True))[request(chat(stream=True)).index(b"\r\n\r\n") + 4 :]
        requests = [_bytes(path + b"?x=canary", line, body=each) for line in SMUGGLED for each in (None, body)]
        replies: list[Reply] = [await request_once(served.port, each) for each in (*requests, _bytes(path, *SMUGGLED[4:]))]
        assert {reply.status for reply in replies} == {200}
        for seen in server.requests:
            assert _names(seen.head) <= TO_SERVER and seen.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
            assert b"canary" not in seen.head and KEY.encode() not in seen.head
        assert all(set(reply.headers) <= TO_CLIENT for reply in replies), {name for reply in replies for name in reply.headers}
        ids = [reply.headers["x-request-id"] for reply in replies]
        assert len(set(ids)) == len(ids) and {seen.header("x-request-id") for seen in server.requests} == set(ids)
    measured(f"{len(SMUGGLED)} headers: the server saw {len(TO_SERVER)} header names at most, the client {len(TO_CLIENT)}; all IDs unique")


@pytest.mark.row(19)
@pytest.mark.parametrize(
    "line",
    [
        b"x-request-id: a\rb: c",
        b"x-request-id: a\nb: c",
        b"x-request-id: a\x00b",
        b"x-request-id: " + b"a" * 2**20,
        b"x-request-id : a",
        b" x-request-id: a",
        b"x-request-id: a\r\n b",
        b"x-request\xffid: a",
        b": a",
        b"x-request-id",
    ],
    ids=lambda line: repr(line[:24]),
)
async def test_malformed_id_headers(line: bytes) -> None:
    async with _served() as (served, server):
        async with client(served.port) as one:
            one.send(_bytes(b"/v1/chat/completions", line))
            reply = await one.reply()
        assert reply.status in (200, 400, 431) and reply.headers["x-request-id"].startswith("req_")
        assert all(_names(seen.head) <= TO_SERVER for seen in server.requests)
        assert (reply.status == 200) == (len(server.requests) == 1)


# Unknown names

STRANGE = 100_000 if FULL else 3_000


@pytest.mark.row(32)
async def test_unknown_names_and_keys_leave_nothing_behind(measured: Callable[[str], None]) -> None:
    """Memory and series do not grow after the first tenth of the requests, which fills buffers and caches."""
    async with _served(KEYS) as (served, server):
        process = psutil.Process()
        await _send_unknown(served, 0, STRANGE // 10)
        series, memory = len(sum_series([served.counters])), process.memory_info().rss
        await _send_unknown(served, STRANGE // 10, STRANGE)
        served.context.records.clear()
        grown = process.memory_info().rss - memory
        assert len(sum_series([served.counters])) == series
        assert grown < 16 * 1024 * 1024, f"{grown} bytes"
        assert server.requests == [] and served.value("auth_failures_total", "invalid") >= STRANGE // 2
        served.context.started = 0
    measured(f"{STRANGE:,} names and keys: 0 new series, {grown / 1024 / 1024:.1f} MiB more resident")


async def _send_unknown(served: Served, first: int, last: int) -> None:
    async with asyncio.TaskGroup() as group:
        for share in range(4):
            group.create_task(_share(served, range(first + share, last, 4)))


async def _share(served: Served, numbers: range) -> None:
    async with client(served.port) as one:
        for number in numbers:
            body = chat(model=f"model-{number}-{'x' * 100}")
            replies = [await one.request(request(body)), await one.request(request(body, token=f"sk-{number}-{'x' * 100}"))]
            assert [reply.status for reply in replies] == [404, 401]
            if number % 100 == 0:
                reply = await one.request(request(path=f"/v1/{number}"))
                assert reply.status == 404
            served.context.records.clear()
            served.context.started = 0
