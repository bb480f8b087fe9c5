"""The client gets exactly the bytes that the server sent, however the network splits them, with three exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.routes import ROUTES, Dialect
from tests.support.examples import examples
from tests.support.running import model, serving
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, COUNT, DONE, EVENTS, HELLO, ROLE, SHOWN, STOP, STREAM_HEAD, chat, client, request, request_once
from upstream.http.deadlines import Timeouts

Examples = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The data in pieces, cut at these places."""
    marks = sorted({cut_at % (len(data) + 1) for cut_at in cuts})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True) if a < b]


def chunked(pieces: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


class _Plan:
    """The next bytes of the server, and their pieces."""

    segments: Sequence[bytes] = ()

    async def __call__(self, talk: Conversation) -> None:
        for segment in self.segments:
            await talk.write(segment)
            await asyncio.sleep(0)


def try_all(run: Callable[[_Plan, int, asyncio.Runner], None]) -> None:
    """Run many examples against one gateway and one server."""
    with asyncio.Runner() as runner:
        plan = _Plan()
        upstream = scripted(plan)
        server = runner.run(upstream.__aenter__())
        gateway = serving([model(server.port)])
        served = runner.run(gateway.__aenter__())
        try:
            run(plan, served.port, runner)
            assert served.in_flight == 0
        finally:
            runner.run(gateway.__aexit__(None, None, None))
            runner.run(upstream.__aexit__(None, None, None))


def test_streams_are_equal_however_they_are_cut() -> None:
    def run(plan: _Plan, port: int, runner: asyncio.Runner) -> None:
        @settings(max_examples=examples(150), deadline=None)
        @given(chunks=CUTS, segments=CUTS, include_usage=st.booleans(), comment=st.booleans())
        def one(chunks: list[int], segments: list[int], include_usage: bool, comment: bool) -> None:
            events = (b": keep-alive\n\n", *EVENTS) if comment else EVENTS
            wire = STREAM_HEAD + chunked(cut(b"".join(events), chunks))
            plan.segments = cut(wire, segments)
            options = {"stream_options": {"include_usage": True}} if include_usage else {}
            reply = runner.run(request_once(port, request(chat(stream=True, **options))))
            assert reply.status == 200 and reply.whole
            assert reply.body == b"".join(event for event in events if include_usage or event != COUNT)
            assert all(piece.endswith(b"\n\n") for piece in reply.pieces), "half an event was passed on"

        one()

    try_all(run)


def test_plain_responses_are_equal_however_they_are_cut() -> None:
    def run(plan: _Plan, port: int, runner: asyncio.Runner) -> None:
        @settings(max_examples=examples(80), deadline=None)
        @given(chunks=CUTS, segments=CUTS, sized=st.booleans())
        def one(chunks: list[int], segments: list[int], sized: bool) -> None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            if sized:
                wire = head + b"content-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION)
            else:
                wire = head + b"transfer-encoding: chunked\r\n\r\n" + chunked(cut(COMPLETION, chunks))
            plan.segments = cut(wire, segments)
            reply = runner.run(request_once(port, request()))
            assert (reply.status, reply.whole, reply.body) == (200, True, COMPLETION)

        one()

    try_all(run)


@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.body == "json"])
async def test_each_json_route_reaches_its_path_and_relays_the_response(path: str) -> None:
    response = b'{"object":"list","data":[{"a":1.50,"b":"\\u00e9"}],"usage":{"prompt_tokens":7,"total_tokens":7}}'
    if ROUTES[path].dialect is Dialect.COHERE:
        response = b'{"embeddings":{"float":[[1.50]]},"meta":{"billed_units":{"input_tokens":7}}}'

    async def script(talk: Conversation) -> None:
        await talk.respond(response)

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(input="x"), path))
        assert (reply.status, reply.body) == (200, response)
        assert server.requests[0].head.split()[1].decode() == ROUTES[path].upstream
        assert served.value("tokens_total", "team-a", "tiny", "prompt") == 7


async def test_the_server_sees_only_what_the_gateway_says() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    async with scripted(script) as server, serving([model(server.port, served="inside")]) as served:
        extra = ("cookie: a=b", "x-request-id: mine", "x-data-parallel-rank: 3", "x-vllm-priority: 1", "te: trailers")
        reply = await request_once(served.port, request(chat(extra_body={"top_k": 5, "model": "tiny"}, top_k=1), extra=extra))
        seen = server.requests[0]
        names = [line.partition(b":")[0].decode() for line in seen.head.split(b"\r\n")[1:]]
        assert names == ["host", "content-type", "x-request-id", "content-length"]
        assert seen.header("x-request-id") == reply.headers["x-request-id"]
        assert seen.json == {"model": "inside", "messages": [{"role": "user", "content": "Hello"}], "top_k": 5}
        assert sorted(reply.headers) == ["content-length", "content-type", "date", "x-request-id"]


async def test_the_first_event_as_an_error_becomes_a_status() -> None:
    error = {"error": {"message": "Requested sample logprobs of 50, which is greater than max allowed: 20 (parameter=logprobs, value=50)",
                       "type": "BadRequestError", "param": "logprobs", "code": 400}}  # fmt: skip

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(b"data: " + orjson.dumps(error) + b"\n\n")
        await talk.chunk(DONE)
        await talk.end_stream()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True, top_logprobs=50)))
        assert reply.status == 400
        assert reply.error == {
            "message": "top_logprobs: Requested sample logprobs of 50, which is greater than max allowed: 20",
            "type": "invalid_request_error", "param": "top_logprobs", "code": "invalid_value",
        }  # fmt: skip


async def test_an_error_within_a_stream_is_put_into_shape() -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE + HELLO)
        await talk.chunk(
            b'data: {"error": {"message": "EngineCore at /opt/x.py", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
        )
        await talk.chunk(DONE)
        await talk.end_stream()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True)))
        shape = {"error": {"message": "The model's server failed.", "type": "server_error", "param": None, "code": "server_error"}}
        assert reply.body == ROLE + HELLO + b"data: " + orjson.dumps(shape) + b"\n\n" + DONE
        assert served.value("incomplete_total", "tiny", "upstream") == 1


@pytest.mark.parametrize("ending", ["reset", "clean"])
async def test_a_truncated_stream_ends_with_an_error_event(ending: str) -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE + HELLO + STOP[:40])
        if ending == "clean":
            await talk.end_stream()
        talk.writer.close()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True)))
        assert reply.whole and reply.status == 200
        assert reply.body.startswith(ROLE + HELLO + b'data: {"error":') and reply.body.endswith(b"\n\n" + DONE)
        error = orjson.loads(reply.body[len(ROLE + HELLO) + 6 : -len(DONE) - 2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "upstream_disconnected")
        assert served.value("incomplete_total", "tiny", "upstream") == 1
        assert served.in_flight == 0


async def test_a_truncated_plain_response_is_never_complete() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
        await asyncio.sleep(0.05)
        talk.writer.close()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request())
        assert not reply.whole
        assert served.value("incomplete_total", "tiny", "upstream") == 1


async def test_a_truncated_response_is_not_complete_for_an_http10_client_either() -> None:
    """It has no other sign of an answer's end than that of the connection."""
    begun = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        await begun.wait()
        talk.writer.close()

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head = await one.reader.readuntil(b"\r\n\r\n")
        assert b"content-length" not in head and b"chunked" not in head
        assert await one.reader.readexactly(2) == b"{}"
        begun.set()
        with pytest.raises(ConnectionResetError):
            await one.reader.read()


async def test_usage_is_counted_if_the_client_did_not_request_it() -> None:
    async def script(talk: Conversation) -> None:
        if not talk.request.json.get("stream"):
            await talk.respond(COMPLETION)
            return
        assert talk.request.json["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
        await talk.begin_stream()
        for event in EVENTS:
            await talk.chunk(event)
        await talk.end_stream()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        for _ in range(3):
            assert (await request_once(served.port, request(chat(stream=True)))).body == b"".join(SHOWN)
            assert (await request_once(served.port, request())).body == COMPLETION
        counts = [served.value("tokens_total", "team-a", "tiny", kind) for kind in ("prompt", "completion", "cached", "reasoning")]
        assert counts == [18, 12, 6, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_servers_connection_is_used_again(stream: bool) -> None:
    async def script(talk: Conversation) -> None:
        if not stream:
            await talk.respond(COMPLETION)
            return
        await talk.begin_stream()
        await talk.chunk(b"".join(EVENTS))
        await talk.end_stream()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        for _ in range(5):
            assert (await request_once(served.port, request(chat(stream=stream)))).status == 200
        assert (len(server.requests), server.accepted) == (5, 1)


@pytest.mark.parametrize(("status", "code"), [("429 Too Many Requests", "rate_limit_exceeded"), ("503 Service Unavailable", "overloaded")])
@pytest.mark.parametrize(("sent_header", "expected"), [(b"retry-after: 7\r\n", "7"), (b"retry-after: tomorrow\r\n", "1"), (b"", "1")])
async def test_how_long_to_wait_is_passed_on(status: str, code: str, sent_header: bytes, expected: str) -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 %b\r\n%bcontent-length: 2\r\n\r\n{}" % (status.encode(), sent_header))

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request())
        assert (reply.error["code"], reply.headers["retry-after"]) == (code, expected)


async def test_a_stream_whose_head_came_early_has_the_first_byte_deadline() -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await asyncio.sleep(1.0)  # the engine's queue: longer than a stream may fall silent
        for event in EVENTS:
            await talk.chunk(event)
        await talk.end_stream()

    timeouts = Timeouts(first_byte=30.0, idle=0.3)
    async with scripted(script) as server, serving([model(server.port, timeouts=timeouts)]) as served:
        assert (await request_once(served.port, request(chat(stream=True)))).body == b"".join(SHOWN)
