"""Relaying a response: errors within it, its end, its bounds."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.settlement import BYTES_PER_TOKEN, Method
from gateway.auth.body_policy import MAX_BATCH
from gateway.auth.catalog import Catalog, CatalogEntry
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import decode, frames
from gateway.proxy.response import EVENT_LIMIT
from gateway.snapshot.snapshot import Allowance, Key, Limits
from tests.gateway.proxy.test_response_bytes import chunked, cut
from tests.support.examples import examples
from tests.support.running import key, model, serving, until
from tests.support.scripted import Conversation, Script, scripted
from tests.support.wire import COMPLETION, DONE, ROLE, Reply, chat, client, request, request_once

COUNTED = b'"usage":{"input_tokens":15,"output_tokens":22}'
START = b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":15,"output_tokens":0}}}\n\n'
DELTA = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},' + COUNTED + b"}\n\n"
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
CREATED = b'event: response.created\ndata: {"response":{"id":"r","usage":null},"type":"response.created"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"response":{"id":"r",' + COUNTED + b'},"type":"response.completed"}\n\n'
MESSAGES = (START, DELTA, STOP)
RESPONSES = (CREATED, COMPLETED)


def streams(*events: bytes, end: bool = True) -> Script:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        for event in events:
            await talk.chunk(event)
        if end:
            await talk.end_stream()
        else:
            talk.writer.close()

    return script


async def streamed(script: Script, path: str = "/v1/chat/completions") -> tuple[Reply, dict[str, float]]:
    """The answer, and what was counted."""
    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True, input="x"), path))
        counted = {kind: served.value("tokens_total", "team-a", "tiny", kind) for kind in ("prompt", "completion")}
        counted["incomplete"] = served.value("incomplete_total", "tiny", "upstream")
        assert served.in_flight == 0
        return reply, counted


@pytest.mark.parametrize(("path", "events"), [("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)])
async def test_named_events_pass_and_are_counted(path: str, events: tuple[bytes, ...]) -> None:
    reply, counted = await streamed(streams(*events), path)
    assert (reply.status, reply.body, reply.whole) == (200, b"".join(events), True)
    assert counted == {"prompt": 15, "completion": 22, "incomplete": 0}


@pytest.mark.parametrize(("path", "events"), [("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)])
@pytest.mark.parametrize("clean", [True, False])
async def test_named_events_that_stop_early(path: str, events: tuple[bytes, ...], clean: bool) -> None:
    reply, counted = await streamed(streams(*events[:-1], events[-1][:30], end=clean), path)
    assert reply.whole and reply.body.startswith(b"".join(events[:-1]) + b"event: error\ndata: {")
    assert reply.body.endswith(b"}\n\n") and DONE not in reply.body
    reported = orjson.loads(reply.body.rpartition(b"data: ")[2])
    assert reported["type"] == "error"
    assert counted["incomplete"] == 1


FAILING = b'{"error": {"message": "EngineCore at /opt/x.py", "type": "InternalServerError", "param": null, "code": 500}}'
MESSAGE = "The model's server failed."
ERRORS = {
    "chat": ("/v1/chat/completions", ROLE, b"data: " + FAILING + b"\n\n", DONE),
    "messages": ("/v1/messages", START,
                 b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"at /opt/x.py"}}\n\n', b""),
    "responses": ("/v1/responses", CREATED,
                  b'event: error\ndata: {"type":"error","code":"server_error","message":"at /opt/x.py","param":null}\n\n', b""),
    "responses in vLLM's shape": ("/v1/responses", CREATED, b"event: error\ndata: " + FAILING + b"\n\n", b""),
}  # fmt: skip


@pytest.mark.parametrize("more", [b"\n", b"\n\n", b"\r\n", b"\n\n\n\n\n"])
@pytest.mark.parametrize("apart", [True, False])
async def test_blank_lines_behind_the_last_event_are_not_an_event(more: bytes, apart: bool) -> None:
    reply, counted = await streamed(streams(ROLE, DONE, more) if apart else streams(ROLE, DONE + more))
    assert (reply.body, counted["incomplete"]) == (ROLE + DONE + more, 0)


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("apart", [True, False])
async def test_line_ends_before_the_first_event_are_sent_with_it(blank: bytes, apart: bool) -> None:
    reply, counted = await streamed(streams(blank, ROLE, DONE) if apart else streams(blank + ROLE, DONE))
    assert (reply.status, reply.body, counted["incomplete"]) == (200, blank + ROLE + DONE, 0)
    error = b"data: " + FAILING + b"\n\n"
    reply, _ = await streamed(streams(blank, error) if apart else streams(blank + error))
    assert reply.status == 500


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_event_is_put_into_shape(name: str) -> None:
    path, before, error, after = ERRORS[name]
    reply, counted = await streamed(streams(before, error, after) if after else streams(before, error), path)
    # Read together with what comes before it, the error is the first thing there is to say, and a status can say it
    if reply.status == 500:
        assert orjson.loads(reply.body)["error"]["message"] == MESSAGE
        return
    assert reply.status == 200 and reply.body.startswith(before) and reply.body.endswith(after)
    assert b"/opt" not in reply.body
    reported = orjson.loads(reply.body[len(before) :].removeprefix(b"event: error\n").removeprefix(b"data: ").partition(b"\n\n")[0])
    assert (reported if reported.get("code") else reported["error"])["message"] == MESSAGE
    assert counted["incomplete"] == 1


def numbered(count: int) -> list[bytes]:
    """The first events of a response, each with its number, as vLLM sends them."""
    document = {"delta": "word " * 10, "type": "response.output_text.delta"}
    return [
        b"event: response.output_text.delta\ndata: %b\n\n" % orjson.dumps({"sequence_number": number} | document) for number in range(count)
    ]


@pytest.mark.parametrize("error", [ERRORS["responses"][2], ERRORS["responses in vLLM's shape"][2], b""])
@pytest.mark.parametrize("together", [1, 3])
async def test_an_error_in_a_response_has_the_number_that_comes_next(error: bytes, together: int) -> None:
    events = [*numbered(5), error] if error else numbered(6)
    number = 5 if error else 6
    reads = [b"".join(events[start : start + together]) for start in range(0, len(events), together)]
    reply, _ = await streamed(streams(*reads, end=False), "/v1/responses")
    *before, reported = [orjson.loads(event.partition(b"data: ")[2]) for event in reply.body.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in before] == list(range(number))
    assert set(reported) == {"type", "code", "message", "param", "sequence_number"}
    assert (reported["type"], reported["sequence_number"]) == ("error", number)


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_as_the_first_event_is_a_status(name: str) -> None:
    path, _, error, after = ERRORS[name]
    reply, counted = await streamed(streams(error, after) if after else streams(error), path)
    assert reply.status == 500
    assert orjson.loads(reply.body)["error"]["message"] == MESSAGE
    assert counted["incomplete"] == 0, "nothing was begun"


@pytest.mark.parametrize(
    "odd",
    [
        b'data: {"error":null}\n\n',
        b'data: {"usage":5,"response":"text","message":[1]}\n\n',
        b'data: {"usage":{"prompt_tokens":"x"}}\n\n',
        b'data: {"usage": not JSON\n\n',
        b'data: ["usage":]\n\n',
        b": keep-alive\n\n",
        b"event: error\n\n",
        b'data: {"type":"error"}x\n\n',
        b'data: {"choices":[{"delta":{"content":"a"},"x":{"finish_reason":"abort","usage":{"prompt_tokens":9}}}]}\n\n',
        b'data: {"choices":[{"delta":{"finish_reason":"abort"},"finish_reason":null}],"x":[{"error":{"message":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"event: error {\\"error\\":"}}]}\n\n',
    ],
)
async def test_events_that_only_look_like_it_pass_as_they_are(odd: bytes) -> None:
    reply, counted = await streamed(streams(ROLE, odd, DONE))
    assert (reply.status, reply.body, counted["incomplete"]) == (200, ROLE + odd + DONE, 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    "error",
    [
        b'data: {"error":"text at /opt/x.py"}\n\n',
        b"event: error\ndata: text at /opt/x.py\n\n",
        b"event:error\rdata: text at /opt/x.py\n\n",
        b"data: " + b"at /opt/x.py" * 10_000 + b"\nevent: error\n\n",
        b'event: error\ndata: {"a":"/opt/x.py"}\n\n',
        b'event: error\ndata: ["/opt/x.py"]\n\n',
        b'data: {"id":1,"error" : {"message":"at /opt/x.py"}}\n\n',
        b'data: {"err\\u006fr":{"message":"at /opt/x.py"}}\n\n',
    ],
)
async def test_an_error_of_another_shape_is_put_into_shape(path: str, error: bytes) -> None:
    first = {"/v1/messages": START, "/v1/responses": CREATED}.get(path, ROLE)
    for before in (b"", first):
        reply, counted = await streamed(streams(before, error) if before else streams(error), path)
        assert b"/opt" not in reply.body and b"The model's server " in reply.body and len(reply.body) < 2000
        assert (reply.status, counted["incomplete"]) in ((200, 1), (500, 0), (502, 0))


async def test_an_event_without_end_is_bounded() -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE)
        while True:
            await talk.chunk(b"data: " + b"x" * 65536)

    reply, counted = await streamed(script)
    assert reply.whole and reply.body.startswith(ROLE + b'data: {"error":') and reply.body.endswith(DONE)
    assert len(reply.body) < EVENT_LIMIT and counted["incomplete"] == 1


async def test_a_long_event_passes() -> None:
    long = b"data: " + b"x" * (EVENT_LIMIT - 100) + b"\n\n"
    reply, _ = await streamed(streams(ROLE, long, DONE))
    assert reply.body == ROLE + long + DONE


@pytest.mark.parametrize("head", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_a_truncated_error_response_is_a_502(head: bytes) -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n\r\n" + (b"5\r\n" if b"chunked" in head else b"") + b'{"err')
        talk.writer.close()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request())
        assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")


async def test_a_body_without_length_is_whole_when_its_connection_ends() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + COMPLETION)
        talk.writer.close()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request())
        assert (reply.status, reply.body, reply.whole) == (200, COMPLETION, True)
        assert served.value("tokens_total", "team-a", "tiny", "prompt") == 3


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.integers(0, 2000), max_size=10), kind=st.sampled_from(["/v1/messages", "/v1/responses"]))
async def test_named_events_however_they_are_cut(chunks: list[int], kind: str) -> None:
    events = MESSAGES if kind == "/v1/messages" else RESPONSES

    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await talk.write(chunked(cut(b"".join(events), chunks)))

    reply, counted = await streamed(script, kind)
    assert reply.body == b"".join(events) and counted == {"prompt": 15, "completion": 22, "incomplete": 0}


async def test_a_server_that_leaves_behind_its_last_event_takes_nothing_from_the_client() -> None:
    reply, counted = await streamed(streams(ROLE, DONE, end=False))
    assert (reply.status, reply.whole, reply.body, counted["incomplete"]) == (200, True, ROLE + DONE, 0)


VECTORS = bytes(range(256)) * 400 + b'"model": "tiny-inside", "usage":{"prompt_tokens":9}'
METADATA = b'{"id": "e", "created": 1, "model": "%b", "data": [{"index": 0}], "usage": {"prompt_tokens": 80, "total_tokens": 80}}'


@pytest.mark.parametrize("rewrite", [False, True])
@pytest.mark.parametrize("reported", [False, True])
async def test_binary_embeddings_keep_their_metadata_and_are_counted(reported: bool, rewrite: bool) -> None:
    """vLLM tells it in a header, or with ``bytes_only`` nothing: then the guess of the prompt stands."""

    async def script(talk: Conversation) -> None:
        line = b"metadata: " + METADATA % b"tiny-inside" + b"\r\n" if reported else b""
        await talk.write(b"HTTP/1.1 200 OK\r\n%bcontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n" % line)
        await talk.chunk(VECTORS[:1000])
        await talk.chunk(VECTORS[1000:])
        await talk.end_stream()

    limited = key(allowances=(Allowance("key team-a", Limits(tokens_per_day=150)),))
    async with scripted(script) as server:
        served_model = model(server.port, served="tiny-inside", rewrite=rewrite)
        async with serving([served_model], [limited]) as served:
            body = {"model": "tiny", "input": "word " * 70, "encoding_format": "bytes" if reported else "bytes_only"}
            reply = await request_once(served.port, request(body, "/v1/embeddings"))
            assert (reply.status, reply.body, reply.whole) == (200, VECTORS, True)
            assert reply.headers["content-type"] == "application/octet-stream"
            name = b"tiny" if rewrite else b"tiny-inside"
            assert reply.headers.get("metadata") == ((METADATA % name).decode() if reported else None)
            await until(lambda: len(served.context.records) == 1)
            estimated = len(request(body, "/v1/embeddings").partition(b"\r\n\r\n")[2]) // BYTES_PER_TOKEN
            assert served.value("tokens_total", "team-a", "tiny", "prompt") == (80 if reported else estimated)
            again = await request_once(served.port, request(body, "/v1/embeddings"))
            assert (again.status, again.error["code"]) == (429, "insufficient_quota")


async def test_binary_embeddings_without_usage_are_estimated_for_the_ledger() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(bytes(8), kind="application/octet-stream")

    body = {"model": "tiny", "input": "word " * 70, "encoding_format": "bytes_only"}
    with closing(Journal.create("test", 1 << 16, 8)) as journal:
        async with scripted(script) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
            assert (await request_once(served.port, request(body, "/v1/embeddings"))).body == bytes(8)
            await until(lambda: len(served.context.records) == 1)
        (row,) = [decode(payload) for payload in frames(journal.read().data)]
    assert (row.prompt, row.completion, row.estimated_by) == (len(orjson.dumps(body)) // BYTES_PER_TOKEN, 0, Method.BYTES)


async def test_binary_embeddings_are_relayed_as_they_arrive() -> None:
    received = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await talk.chunk(VECTORS[:1000])
        await received.wait()
        await talk.chunk(VECTORS[1000:])
        await talk.end_stream()

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request({"model": "tiny", "input": "a", "encoding_format": "bytes_only"}, "/v1/embeddings"))
        reply = asyncio.create_task(one.reply())
        await one.begun.wait()
        received.set()
        assert (await reply).body == VECTORS


async def test_the_largest_number_of_binary_embeddings_of_one_request() -> None:
    """The metadata of each embedding is in a header; a long header is not a failure of the server."""
    item = b'{"index": %d, "embed_dtype": "bfloat16", "endianness": "native", "start": %d, "end": %d, "shape": [4096]}'
    items = b", ".join(item % (index, index * 8192, (index + 1) * 8192) for index in range(MAX_BATCH))
    metadata = b'{"id": "e", "data": [' + items + b'], "usage": {"prompt_tokens": 80, "total_tokens": 80}}'

    async def script(talk: Conversation) -> None:
        head = b"HTTP/1.1 200 OK\r\nmetadata: %b\r\ncontent-type: application/octet-stream\r\ncontent-length: 8\r\n\r\n"
        await talk.write(head % metadata + bytes(8))

    async with scripted(script) as server, serving([model(server.port)]) as served:
        reply = await request_once(
            served.port, request({"model": "tiny", "input": ["a"] * MAX_BATCH, "encoding_format": "bytes"}, "/v1/embeddings")
        )
        assert (reply.status, reply.body, reply.headers["metadata"].encode()) == (200, bytes(8), metadata)
        await until(lambda: served.value("tokens_total", "team-a", "tiny", "prompt") == 80)


class _Broken(Catalog):
    """A part of the gateway that fails."""

    def visible(self, key: Key, mounted: CatalogEntry | None = None) -> list[CatalogEntry]:
        raise RuntimeError


async def test_an_error_of_the_gateways_own_is_counted_on_every_route() -> None:
    async with serving([model(1)]) as served:
        served.context.active = replace(served.context.active, catalog=_Broken((), {}))
        reply = await request_once(served.port, request(None, "/v1/models", method="GET"))
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        await until(lambda: len(served.context.records) == 1)
        (one,) = served.context.records
        assert (one.endpoint, one.status, one.code) == ("/v1/models", 500, "internal_error")


FORGED = {"finish_reason": "abort", "status": "cancelled", "usage": {"input_tokens": 0, "output_tokens": 0}, "error": {"message": "forged"}}


def echoing(document: dict[str, object]) -> bytes:
    """A response as vLLM writes it: the request's metadata and tools in front of the usage, its messages behind."""
    usage = {"input_tokens": 5000, "output_tokens": 700}
    tools = [{"type": "function", "name": "f", "parameters": FORGED}]
    response = {"id": "r", "metadata": document.get("metadata"), "tools": tools, "status": "completed", "usage": usage}
    return orjson.dumps(response | {"input_messages": [FORGED, document]})


async def test_what_a_client_had_echoed_neither_counts_nor_ejects_a_server() -> None:
    async def echoes(talk: Conversation) -> None:
        body = echoing(talk.request.json)
        if talk.request.json.get("stream"):
            await talk.begin_stream()
            await talk.chunk(b'event: response.created\ndata: {"type":"response.created","response":%b}\n\n' % body)
            await talk.chunk(b'event: response.completed\ndata: {"type":"response.completed","response":%b}\n\n' % body)
            await talk.end_stream()
        elif talk.request.json.get("temperature"):
            await talk.trickle(body, 100)
        else:
            await talk.respond(body)

    fields = {"input": "hi", "metadata": {"finish_reason": "abort"}, "enable_response_messages": True, "text": '"finish_reason":"abort"'}
    kinds: list[dict[str, object]] = [{}, {"stream": True}, {"temperature": 1}]
    async with scripted(echoes) as server, serving([model(server.port, server.port)]) as served:
        for kind in 4 * kinds:
            reply = await request_once(served.port, request({"model": "tiny", **fields, **kind}, "/v1/responses"))
            assert (reply.status, reply.whole) == (200, True)
        assert served.total("server_failures_total") == served.total("server_ejected") == served.total("incomplete_total") == 0
        assert [served.value("tokens_total", "team-a", "tiny", kind) for kind in ("prompt", "completion")] == [60_000, 8_400]


async def test_a_response_whose_engine_stopped_is_incomplete() -> None:
    async def cancelled(talk: Conversation) -> None:
        body = echoing({}).replace(b'"status":"completed"', b'"status":"cancelled"')
        if talk.request.json.get("stream"):
            await talk.begin_stream()
            await talk.chunk(b'event: response.completed\ndata: {"type":"response.completed","response":%b}\n\n' % body)
            await talk.end_stream()
        else:
            await talk.respond(body)

    async with scripted(cancelled) as server, serving([model(server.port)]) as served:
        for stream in (False, True):
            assert (
                await request_once(served.port, request({"model": "tiny", "input": "hi", "stream": stream}, "/v1/responses"))
            ).status == 200
        assert served.value("server_failures_total", "tiny", "tiny#0", "aborted") == 2
        assert served.value("incomplete_total", "tiny", "upstream") == 2


async def test_text_of_a_recording_is_not_read_as_usage() -> None:
    text = b'{"usage":{"prompt_tokens":9},"choices":[{"finish_reason":"abort"}]}'

    async def speaks(talk: Conversation) -> None:
        await talk.respond(text, kind="text/plain; charset=utf-8")

    async with scripted(speaks) as server, serving([model(server.port)]) as served:
        assert (await request_once(served.port, request())).body == text
        assert served.total("tokens_total") == served.total("server_failures_total") == 0


@pytest.mark.parametrize("size", [0, 20_000, 200_000], ids=["small", "serialized early", "processed in steps"])
@pytest.mark.parametrize("in_stream", [False, True])
async def test_an_error_is_explained_by_the_body_of_its_request(size: int, in_stream: bool) -> None:
    error = b'{"error":{"message":"Unexpected message role.","type":"BadRequestError","param":null,"code":400}}'

    async def script(talk: Conversation) -> None:
        if in_stream:
            await talk.begin_stream()
            await talk.chunk(b"data: " + error + b"\n\n")
            await talk.end_stream()
        else:
            await talk.respond(error, "400 Bad Request")

    async with scripted(script) as server, serving([model(server.port)]) as served:
        messages = [{"role": "user", "content": "x" * size}, {"role": "nobody", "content": "x"}]
        reply = await request_once(served.port, request(chat(stream=in_stream, messages=messages)))
        assert (reply.status, reply.error["param"]) == (400, "messages.1.role")


async def test_running_usage_that_the_client_requested_counts_a_truncated_stream() -> None:
    """No limit and no ledger requests it: the gateway reads what the client gets."""
    tokens = [
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],'
        b'"usage":{"prompt_tokens":9,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (9 + count, count)
        for count in (1, 2, 3)
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with scripted(streams(*tokens, end=False)) as server, serving([model(server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True, stream_options=options)))
        assert server.requests[0].json["stream_options"] == options
        assert reply.body.startswith(b"".join(tokens) + b'data: {"error":')
        await until(lambda: served.value("incomplete_total", "tiny", "upstream") == 1)
        assert [served.value("tokens_total", "team-a", "tiny", kind) for kind in ("prompt", "completion")] == [9, 3]


async def test_a_response_above_the_drain_limit_is_not_read_after_its_client_has_disconnected() -> None:
    disconnected = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n{"a' % (1 << 40))
        await talk.closed_by_peer()
        disconnected.set()

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(request())
        await one.reader.readuntil(b'{"a')
        one.disconnect()
        await until(disconnected.is_set)
        await until(lambda: served.in_flight == 0)
        assert (served.context.records[0].status, served.context.records[0].incomplete) == (499, "client")
