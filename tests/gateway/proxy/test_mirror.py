"""Copies of requests for another model: they are sent, and nothing about them reaches a client, its limits or its rows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

import orjson
import pytest

from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import MIRRORED, UsageRow, decode, frames
from gateway.proxy.response import EVENT_LIMIT
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Allowance, Key, Limits, Mirror, Model
from gateway.telemetry.metrics import Series, sum_series
from gateway.worker.drain import drain
from tests.support import wire
from tests.support.money import price
from tests.support.ports import refusing, silent
from tests.support.running import Served, key, model, serving, until
from tests.support.scripted import Conversation, Script, Scripted, scripted
from tests.support.wire import COMPLETION, COUNT, DONE, EVENTS, ROLE, SHOWN, chat, client, request, request_once
from upstream.balancing.server import Condition
from upstream.http.deadlines import Timeouts

RESULTS = ("completed", "failed", "no_capacity", "limit", "drain")


async def responds(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        await talk.chunk(b"".join(EVENTS))
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


async def hangs(talk: Conversation) -> None:
    """Send nothing until the gateway closes the connection."""
    await talk.closed_by_peer()


def pair(port: int, other: int, share: float = 1.0, most: int = 16, **more: Any) -> list[Model]:
    """A model, and the model that gets copies of its requests. ``more``: settings of the latter."""
    return [model(port, mirror=Mirror("other", share, most)), model(other, identity="other", **more)]


@asynccontextmanager
async def mirroring(
    script: Script, copied: Script, *keys: Key, share: float = 1.0, most: int = 16, ledger: Recorder | None = None, **more: Any
) -> AsyncIterator[tuple[Served, Scripted, Scripted]]:
    """Serve a model, and the model that gets copies. ``more``: settings of the latter."""
    async with (
        scripted(script) as server,
        scripted(copied) as other,
        serving(pair(server.port, other.port, share, most, **more), keys, ledger=ledger) as served,
    ):
        yield served, server, other


def results(served: Served) -> dict[str, float]:
    """Return the copies by result, without those that are 0."""
    found = {result: served.value("mirrored_requests_total", "tiny", "other", result) for result in RESULTS}
    return {result: count for result, count in found.items() if count}


def copies(served: Served) -> float:
    return served.value("mirrored_inflight_requests", "tiny", "other")


@pytest.fixture
def journal() -> Iterator[Journal]:
    with closing(Journal.create("test")) as made:
        yield made


def rows(journal: Journal) -> list[UsageRow]:
    return [decode(payload) for payload in frames(journal.read().data)]


async def test_a_copy_has_the_same_body_and_the_other_models_name() -> None:
    async with scripted(responds) as server, scripted(responds) as other:
        models = pair(server.port, other.port, served="inside", overrides={"seed": 3}, aliases=("o",))
        models[0] = replace(models[0], defaults={"top_k": 1})
        async with serving(models) as served:
            assert Series("mirrored_requests_total", ("tiny", "other", "limit")) in sum_series([served.counters]), "from the start, with 0"
            reply = await request_once(served.port, request(chat(temperature=0.5)))
            assert (reply.status, reply.body) == (200, COMPLETION)
            await until(lambda: results(served) == {"completed": 1})
            sent, copy = server.requests[0], other.requests[0]
            assert copy.json == {**sent.json, "model": "inside"} and "seed" not in copy.json, "as the model's own server gets it"
            assert copy.header("x-request-id") == f"{sent.header('x-request-id')}-mirror" == f"{reply.headers['x-request-id']}-mirror"
            assert not any("mirror" in name for name in reply.headers)
            stream = await request_once(served.port, request(chat(stream=True)))
            assert (stream.status, stream.body) == (200, b"".join(SHOWN))
            await until(lambda: results(served) == {"completed": 2})
            assert other.requests[1].json == {**server.requests[1].json, "model": "inside"}
            await until(lambda: served.in_flight == copies(served) == len(served.context.mirrors) == 0)
            assert (await request_once(served.port, request(chat(model="o")))).status == 200
            assert results(served) == {"completed": 2} and len(server.requests) == 2, "the other model's own requests are not copied"


async def test_the_token_ids_of_a_mirrored_stream_are_hidden() -> None:
    """The gateway requests them for a continuation on another server, with or without a mirror."""

    async def with_ids(talk: Conversation) -> None:
        ids = "[7]" if talk.request.json.get("return_token_ids") else "null"
        await talk.begin_stream()
        await talk.chunk(ROLE + wire.event(f'[{{"index":0,"delta":{{"content":"a"}},"finish_reason":null,"token_ids":{ids}}}]') + DONE)
        await talk.end_stream()

    async with scripted(with_ids) as server, scripted(with_ids) as other:
        models = [model(server.port, server.port, mirror=Mirror("other", 1.0, 16)), model(other.port, identity="other")]
        async with serving(models) as served:
            for each in served.worker.fleet:
                each.scale_out = True
            reply = await request_once(served.port, request(chat(stream=True, temperature=0)))
            await until(lambda: results(served) == {"completed": 1})
    assert server.requests[0].json["return_token_ids"] is True
    assert b'"token_ids":null' in reply.body and b"[7]" not in reply.body


async def test_a_large_body_is_copied_too_while_memory_is_free() -> None:
    async with (
        scripted(responds) as server,
        scripted(responds) as other,
        serving(pair(server.port, other.port, served="a-longer-name")) as served,
    ):
        body = chat(messages=[{"role": "user", "content": "x" * 300_000}])
        assert (await request_once(served.port, request(body))).status == 200
        await until(lambda: results(served) == {"completed": 1})
        assert other.requests[0].json == {**server.requests[0].json, "model": "a-longer-name"}
        await until(lambda: served.in_flight == 0)
        assert served.context.memory.held == 0
        served.context.memory.limit = 1_400_000
        assert (await request_once(served.port, request(body))).status == 200
        await until(lambda: results(served) == {"completed": 1, "limit": 1})


async def test_a_share_of_the_requests_is_copied() -> None:
    async with mirroring(responds, responds, share=0.25) as (served, _, other), client(served.port) as one:
        for _ in range(120):
            assert (await one.request(request())).status == 200
        await until(lambda: copies(served) == 0)
        assert 10 < results(served)["completed"] == len(other.requests) < 60
        expected = {each.id for each in served.context.records if int(each.id[-8:], 16) < 0.25 * 2**32}
        assert {each.header("x-request-id") for each in other.requests} == {f"{identity}-mirror" for identity in expected}


async def refuses(talk: Conversation) -> None:
    await talk.respond(b'{"error":{"message":"no","type":"x","param":null,"code":500}}', "500 Internal Server Error")


async def breaks_off(talk: Conversation) -> None:
    await talk.begin_stream()
    await talk.chunk(EVENTS[0])
    talk.writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [hangs, refuses, breaks_off])
async def test_the_client_gets_the_same_bytes_whatever_the_other_model_does(script: Script, stream: bool) -> None:
    async with scripted(responds) as server, scripted(script) as other, serving(pair(server.port, other.port)) as served:
        async with client(served.port) as one:
            for _ in range(3):  # on one connection: each response has ended
                reply = await one.request(request(chat(stream=stream)))
                assert (reply.status, reply.body) == (200, b"".join(SHOWN) if stream else COMPLETION)
        await until(lambda: len(other.requests) == 3)
        if script is hangs:
            assert copies(served) == 3 and results(served) == {}, "the responses ended while the copies hang"
        else:
            await until(lambda: results(served) == {"failed": 3})
        assert [record.status for record in served.context.records] == [200] * 3
        assert {record.model for record in served.context.records} == {"tiny"}


async def test_a_server_that_does_not_accept_connections_delays_nothing() -> None:
    with silent() as port:
        async with scripted(responds) as server, serving(pair(server.port, port, timeouts=Timeouts(connect=0.2))) as served:
            reply = await request_once(served.port, request())
            assert (reply.status, reply.body) == (200, COMPLETION)
            await until(lambda: results(served) == {"failed": 1})
            assert served.value("server_failures_total", "other", "other#0", "connect_timeout") == 1


async def test_a_dead_server_fails_copies_only() -> None:
    with refusing() as port:
        async with scripted(responds) as server, serving(pair(server.port, port)) as served:
            assert (await request_once(served.port, request())).status == 200
            await until(lambda: results(served) == {"failed": 1})
            assert served.value("server_failures_total", "other", "other#0", "connect") == 1
            assert served.value("server_failures_total", "tiny") == 0


async def test_nothing_is_queued_for_a_model_that_is_down_or_full() -> None:
    async with scripted(responds) as server, scripted(hangs) as other:
        models = pair(server.port, other.port, max_inflight=1)
        async with serving(models) as served:
            assert (await request_once(served.port, request())).status == 200
            await until(lambda: len(other.requests) == 1)
            assert (await request_once(served.port, request())).status == 200
            await until(lambda: results(served) == {"no_capacity": 1})
            other.hang_up()
            await until(lambda: results(served) == {"no_capacity": 1, "failed": 1})
            served.worker.apply_health(Health({"other#0": Condition.DOWN}, {}, {}))
            assert (await request_once(served.port, request())).status == 200
            await until(lambda: results(served) == {"no_capacity": 2, "failed": 1})
            assert served.total("queued_requests") == 0 and served.demand == []
            assert len(other.requests) == 1


async def test_the_copies_in_flight_have_a_bound() -> None:
    async with scripted(responds) as server, scripted(hangs) as other, serving(pair(server.port, other.port, most=2)) as served:
        for _ in range(5):
            assert (await request_once(served.port, request())).status == 200
        await until(lambda: len(other.requests) == 2)
        assert copies(served) == 2 and results(served) == {"limit": 3}


async def test_a_client_that_disconnects_does_not_end_the_copy() -> None:
    release = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with scripted(hangs) as server, scripted(waits) as other, serving(pair(server.port, other.port)) as served:
        async with client(served.port) as one:
            one.send(request())
            await until(lambda: len(server.requests) == len(other.requests) == 1)
        await until(lambda: len(served.context.records) == 1 and served.context.records[0].status == 499)
        assert copies(served) == 1
        release.set()
        await until(lambda: results(served) == {"completed": 1})


async def test_the_timeouts_of_the_other_model_bound_a_copy() -> None:
    async with mirroring(responds, hangs, timeouts=Timeouts(first_byte=0.3)) as (served, _, other):
        assert (await request_once(served.port, request())).status == 200
        await until(lambda: results(served) == {"failed": 1})
        await until(lambda: other.open == 0)


async def test_a_drain_ends_copies_at_once_and_starts_none(journal: Journal) -> None:
    release = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with mirroring(waits, hangs, ledger=Recorder(journal)) as (served, server, other), client(served.port) as one:
        one.send(request())
        await until(lambda: len(server.requests) == len(other.requests) == 1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            draining = asyncio.create_task(drain(served.worker, None, listener, 30))
            await until(lambda: results(served) == {"drain": 1} and other.open == 0)
            assert not draining.done(), "the request itself has time to finish"
            release.set()
            assert (await one.reply()).body == COMPLETION
            await draining
        assert [(row.key, row.incomplete) for row in rows(journal)] == [(MIRRORED, "drain"), ("team-a", None)]


async def test_copies_are_not_billed_and_have_rows_of_no_key(journal: Journal) -> None:
    limited = key(allowances=(Allowance("key team-a", Limits(requests_per_minute=2, tokens_per_day=10_000)),))
    async with scripted(responds) as server, scripted(responds) as other:
        models = pair(server.port, other.port, price=price(5.0, 5.0))
        async with serving(models, [limited], ledger=Recorder(journal)) as served:
            for stream in (False, True):
                assert (await request_once(served.port, request(chat(stream=stream, n=2)))).status == 200
            await until(lambda: results(served) == {"completed": 2})
            await until(lambda: served.in_flight == 0)
            assert served.value("tokens_total", "team-a", "tiny", "prompt") == 6 and served.value("tokens_total", "team-a", "other") == 0
            assert served.value("requests_total", "other") == 0 and len(served.context.records) == 2
            own = [row for row in rows(journal) if row.key == "team-a"]
            assert [(row.model, row.prompt, row.completion) for row in own] == [("tiny", 3, 2)] * 2
            found = [row for row in rows(journal) if row.key != "team-a"]
            assert {row.id for row in found} == {f"{row.id}-mirror" for row in own}
            facts = [
                (row.key, row.model, row.server, row.status, row.incomplete, row.prompt, row.completion, row.cost, row.choices)
                for row in found
            ]
            assert facts == [(MIRRORED, "other", "other#0", 200, None, 3, 2, None, 2)] * 2


STARTED = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":0}}}\n\n'
DELTA = b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"input_tokens":7,"output_tokens":4}}\n\n'
ENDED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":7,"output_tokens":4}}}\n\n'


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/messages", (STARTED, DELTA, ENDED)),
        ("/v1/responses", (b'event: response.created\ndata: {"type":"response.created","response":{"usage":null}}\n\n', COMPLETED)),
    ],
)
async def test_the_usage_of_other_streams_is_recorded_too(path: str, events: tuple[bytes, ...], journal: Journal) -> None:
    async def streams(talk: Conversation) -> None:
        await talk.begin_stream()
        for event in events:
            await talk.chunk(event[:9])
            await talk.chunk(event[9:])
        await talk.end_stream()

    fields = {"messages": chat()["messages"], "max_tokens": 9} if path == "/v1/messages" else {"input": "a"}
    async with mirroring(streams, streams, ledger=Recorder(journal)) as (served, _, _):
        assert (await request_once(served.port, request({"model": "tiny", "stream": True, **fields}, path))).status == 200
        await until(lambda: results(served) == {"completed": 1} and served.in_flight == 0)
        (copy,) = [row for row in rows(journal) if row.key == MIRRORED]
        assert (copy.prompt, copy.completion, copy.endpoint) == (7, 4, path)


async def test_the_usage_of_binary_embeddings_is_recorded_too(journal: Journal) -> None:
    async def embeds(talk: Conversation) -> None:
        line = b'metadata: {"usage":{"prompt_tokens":7,"total_tokens":7}}\r\n' if talk.request.json["encoding_format"] == "bytes" else b""
        await talk.write(b"HTTP/1.1 200 OK\r\n%bcontent-type: application/octet-stream\r\ncontent-length: 8\r\n\r\n" % line + bytes(8))

    async with mirroring(embeds, embeds, ledger=Recorder(journal)) as (served, _, _):
        for number, encoding in enumerate(("bytes", "bytes_only"), 1):
            body = {"model": "tiny", "input": "a", "encoding_format": encoding}
            assert (await request_once(served.port, request(body, "/v1/embeddings"))).body == bytes(8)
            await until(lambda number=number: results(served) == {"completed": number})
        copies = [row for row in rows(journal) if row.key == MIRRORED]
        assert [(copy.prompt, copy.estimated_by) for copy in copies] == [(7, None), (None, None)]


@pytest.mark.parametrize("size", [100, 2 * EVENT_LIMIT], ids=["in the middle", "above the limit"])
async def test_a_copy_is_read_to_its_end_whatever_its_events_contain(size: int, journal: Journal) -> None:
    """A usage is read from any event with the field. An event above the limit ends the search, not the copy."""
    odd = b'data: ["usage"]\n\n', b'data: {"usage"\n\n', ROLE, b"data: " + b"x" * size + b"\n\n"
    last = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}\n\n'

    async def streams(talk: Conversation) -> None:
        await talk.begin_stream()
        for event in (COUNT, *odd, last, DONE):
            await talk.chunk(event)
        await talk.end_stream()

    async with mirroring(responds, streams, ledger=Recorder(journal)) as (served, _, _):
        reply = await request_once(served.port, request(chat(stream=True)))
        assert reply.body == b"".join(SHOWN)
        await until(lambda: results(served) == {"completed": 1} and served.in_flight == 0)
        (copy,) = [row for row in rows(journal) if row.key == MIRRORED]
        assert (copy.prompt, copy.completion, copy.incomplete) == (3, 2 if size > EVENT_LIMIT else 5, None)


async def test_a_request_that_is_sent_again_is_copied_once() -> None:
    """The server closes the idle connection on which the second request is sent first."""

    async def closes_the_second(talk: Conversation) -> None:
        if talk.number == 2:
            talk.writer.close()
        else:
            await talk.respond(COMPLETION)

    async with mirroring(closes_the_second, responds) as (served, server, other):
        for _ in range(2):
            assert (await request_once(served.port, request())).status == 200
        assert len(server.requests) == 3
        await until(lambda: results(served) == {"completed": 2})
        assert len(other.requests) == 2


async def test_a_split_and_a_fallback_have_their_own_mirrors() -> None:
    async with scripted(responds) as server, scripted(responds) as other:
        models = [*pair(server.port, other.port), model(1, identity="down", fallbacks=("tiny",)), Model("chat", (), split=(("tiny", 1),))]
        async with serving(models) as served:
            served.worker.apply_health(Health({"down#0": Condition.DOWN}, {}, {}))
            assert (await request_once(served.port, request(chat(model="chat")))).headers["x-vllm-gateway-model"] == "tiny"
            await until(lambda: results(served) == {"completed": 1})
            assert (await request_once(served.port, request(chat(model="down")))).headers["x-vllm-gateway-fallback"] == "tiny"
            assert len(other.requests) == 1, "served as a fallback, it is not copied"


async def test_a_request_that_is_refused_or_never_sent_is_not_copied() -> None:
    limited = key(allowances=(Allowance("key team-a", Limits(tokens_per_minute=5)),))
    async with mirroring(responds, responds, limited, key("free", "sk-free")) as (served, _, other):
        assert [(await request_once(served.port, request(chat(max_tokens=9)))).status for _ in range(2)] == [200, 429]
        await until(lambda: results(served) == {"completed": 1})
        served.worker.apply_health(Health({"tiny#0": Condition.DOWN}, {}, {}))
        assert (await request_once(served.port, request(chat(), token="sk-free"))).status == 503
        assert (await request_once(served.port, request(chat(n=1000), token="sk-free"))).status == 400
        assert results(served) == {"completed": 1} and copies(served) == 0 and len(other.requests) == 1


async def test_the_document_of_an_error_is_that_of_the_request() -> None:
    """The body of a small request is shared with its copy, which must not change it."""

    async def rejects(talk: Conversation) -> None:
        document = orjson.dumps(
            {"error": {"message": f"The model `{talk.request.json['model']}` does not exist.", "type": "NotFoundError", "code": 404}}
        )
        await talk.respond(document, "404 Not Found")

    async with scripted(rejects) as server, scripted(responds) as other, serving(pair(server.port, other.port)) as served:
        reply = await request_once(served.port, request())
        assert reply.status == 404 and b"other" not in reply.body
