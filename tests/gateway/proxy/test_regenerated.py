"""A stream without token IDs whose server is lost continues on another server, as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.api.routes import ROUTES
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Allowance, Limits
from gateway.telemetry.request_record import RequestRecord
from tests.faults.chaos import CLEAR, Weather, chaos
from tests.gateway.continuation.streams import view_of
from tests.support.running import MODEL, Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.simulated import simulated
from tests.support.wire import DEAD_ENGINE, DONE, HELLO, ROLE, Reply, chat, delta, request, request_once
from upstream.balancing.server import Condition

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
MESSAGE_LIST = [{"role": "user", "content": "Compare the weather in Hangzhou and Paris."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
USAGE = {"stream_options": {"include_usage": True}}
BODIES = {
    "chat": (CHAT, {"messages": MESSAGE_LIST, "temperature": 0, "logprobs": True, "top_logprobs": 2, **USAGE}),
    "tools": (CHAT, {"messages": MESSAGE_LIST, "seed": 3, "tools": [{"type": "function", "function": FUNCTION}]}),
    "choices": (CHAT, {"messages": MESSAGE_LIST, "seed": 3, "n": 3, **USAGE}),
    "completion": (COMPLETIONS, {"prompt": "Once", "temperature": 0, "logprobs": 1, "max_tokens": 40}),
    "message": (MESSAGES, {"messages": MESSAGE_LIST, "temperature": 0, "max_tokens": 60}),
    "message with tools": (MESSAGES, {"messages": MESSAGE_LIST, "temperature": 0, "max_tokens": 60, "tools": [
        {"name": "weather", "input_schema": PARAMETERS},
    ]}),
    "response": (RESPONSES, {"input": MESSAGE_LIST, "temperature": 0}),
    "response with tools": (RESPONSES, {"input": MESSAGE_LIST, "temperature": 0, "tools": [{"type": "function", **FUNCTION}]}),
}  # fmt: skip
CUTS = 9


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    parsers = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    with simulated(MODEL, *parsers, "--sim-tokens-per-second", "0", "--sim-tool-calls", "2", "--sim-tokens", "60") as port:
        yield port


async def sent(data: bytes, *servers: int, first: Weather = CLEAR) -> tuple[Reply, RequestRecord, int]:
    """Send a request to a gateway whose model has these servers. ``first``: the faults of the gateway's first connection.

    Returns the response, its record, and the bytes that the servers sent.
    """
    weathers = iter((first,))
    limited = key(allowances=(Allowance("key team-a", Limits(tokens_per_minute=10_000_000)),))
    async with AsyncExitStack() as stack:
        networks = [await stack.enter_async_context(chaos(port, lambda _: next(weathers, CLEAR))) for port in servers]
        served = await stack.enter_async_context(serving([model(*(each.port for each in networks))], [limited]))
        reply = await request_once(served.port, data)
        await until(lambda: served.in_flight == 0)
        return reply, served.context.records.pop(), sum(each.passed for each in networks)


@pytest.mark.parametrize("name", BODIES)
async def test_a_cut_stream_is_like_an_undisturbed_one(server: int, name: str) -> None:
    path, body = BODIES[name]
    dialect = ROUTES[path].dialect
    data = request({"model": MODEL, "stream": True, **body}, path)
    whole, expected, size = await sent(data, server, server)
    undisturbed = view_of(whole.body, dialect)
    continued = 0
    for cut in range(1, CUTS + 1):
        reply, record, _ = await sent(data, server, server, first=Weather(cut_at=size // 4 + size * 3 // 4 * cut // (CUTS + 1)))
        assert (reply.status, view_of(reply.body, dialect)) == (200, undisturbed)
        assert (record.usage, record.incomplete, record.code) == (expected.usage, None, None)
        continued += len(record.continuations)
        for each in record.continuations:
            assert (each.cause, each.path, each.outcome) == ("disconnected", "regeneration", "continued")
            assert each.lost_tokens > 0
    assert continued == CUTS


def chunk(text: str, identity: str = "x") -> bytes:
    document = '{"id":"%s","created":1,"model":"tiny","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'
    return b"data: %b\n\n" % (document % (identity, text)).encode()


@asynccontextmanager
async def scripted_pair(second: Callable[[Conversation], Any]) -> AsyncIterator[Served]:
    """Serve a model with two servers: the first request is cut after two events, and the next one gets ``second``."""
    talks: list[Conversation] = []

    async def respond(talk: Conversation) -> None:
        talks.append(talk)
        await talk.begin_stream()
        if len(talks) == 1:
            await talk.chunk(chunk("one "))
            await talk.chunk(chunk("two "))
            talk.writer.close()
        else:
            await second(talk)

    async with scripted(respond) as one, scripted(respond) as other, serving([model(one.port, other.port)]) as served:
        yield served


SEEDED = request(chat(stream=True, seed=1))


async def test_a_different_response_ends_the_stream_with_the_first_error() -> None:
    async def different(talk: Conversation) -> None:
        await talk.chunk(chunk("one three"))
        await talk.closed_by_peer()

    async with scripted_pair(different) as served:
        reply = await asyncio.wait_for(request_once(served.port, SEEDED), 30)
        assert b"three" not in reply.body
        assert b"upstream_disconnected" in reply.body
        await until(lambda: served.in_flight == 0)
        [record] = served.context.records
        assert [each.outcome for each in record.continuations] == ["different"]
        assert len(record.failures) == 1, "the second server did nothing wrong"


async def test_an_event_is_split_where_the_first_stream_was_cut() -> None:
    async def other_groups(talk: Conversation) -> None:
        await talk.chunk(chunk("one two three", "y"))
        await talk.chunk(b'data: {"id":"y","created":2,"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        await talk.end_stream()

    async with scripted_pair(other_groups) as served:
        reply = await asyncio.wait_for(request_once(served.port, SEEDED), 30)
        last = b'data: {"id":"x","created":1,"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"model":"tiny"}\n\ndata: [DONE]\n\n'
        assert reply.body == chunk("one ") + chunk("two ") + chunk("three") + last


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("without token IDs", b'data: {"id":"x","choices":[{"index":0,"text":"one ","finish_reason":null}]}\n\n'),
        (
            "not JSON for the gateway",
            b'data: {"id":"x","choices":[{"index":0,"text":"one ","token_ids":[1],"finish_reason":null}],"y":NaN}\n\n',
        ),
        ("a comment instead of an event", b": wait\n\n"),
    ],
)
async def test_a_completion_whose_tokens_are_not_known_is_not_continued(name: str, first: bytes) -> None:
    async def respond(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(first)
        talk.writer.close()

    data = request({"model": MODEL, "prompt": "Once", "temperature": 0, "stream": True}, COMPLETIONS)
    async with scripted(respond) as one, scripted(respond) as other, serving([model(one.port, other.port)]) as served:
        reply = await asyncio.wait_for(request_once(served.port, data), 30)
        assert b"upstream_disconnected" in reply.body, name
        assert len(one.requests + other.requests) == 1, "no server gets a prompt without its tokens"
        assert b'token_ids":[' not in reply.body


@pytest.mark.parametrize("body", [{"temperature": 0}, {"seed": 1}], ids=["token IDs", "regeneration"])
async def test_a_stream_does_not_continue_on_a_server_with_another_model(body: dict[str, Any]) -> None:
    """A reload has replaced the servers of the model by those of another one, under the same ID."""
    is_reloaded = asyncio.Event()
    event = b'data: {"id":"x","choices":[{"index":0,"text":"a","token_ids":[1],"prompt_token_ids":[2],"finish_reason":null}]}\n\n'

    async def old(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(event)
        await is_reloaded.wait()
        talk.writer.close()

    async def new(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(event + b"data: [DONE]\n\n")
        await talk.end_stream()

    data = request({"model": MODEL, "prompt": "Once", "stream": True, **body}, COMPLETIONS)
    async with scripted(old) as one, scripted(new) as other, serving([model(one.port, one.port)]) as served:
        replying = asyncio.create_task(request_once(served.port, data))
        await until(lambda: any(server.movable for server in served.worker.fleet))
        replaced = model(other.port, other.port, served="another")
        served.worker.apply_snapshot(replace(served.worker.snapshot, models=(replaced,)))
        served.worker.apply_health(Health({spec.name: Condition.UP for spec in replaced.servers}, {}))
        is_reloaded.set()
        reply = await asyncio.wait_for(replying, 30)
        assert b"upstream_disconnected" in reply.body
        assert not other.requests


async def test_a_request_that_is_moved_from_a_removed_server_goes_to_a_new_one() -> None:
    async def silent(talk: Conversation) -> None:
        await talk.closed_by_peer()

    async def new(talk: Conversation) -> None:
        await talk.respond(b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}')

    data = request({"model": MODEL, "prompt": "Once"}, COMPLETIONS)
    async with scripted(silent) as one, scripted(new) as other, serving([model(one.port, one.port, move_after=0.0)]) as served:
        replying = asyncio.create_task(request_once(served.port, data))
        await until(lambda: one.requests)
        replaced = model(other.port, other.port)
        served.worker.apply_snapshot(replace(served.worker.snapshot, models=(replaced,)))
        served.worker.apply_health(Health({spec.name: Condition.UP for spec in replaced.servers}, {}))
        assert (await asyncio.wait_for(replying, 30)).status == 200
        assert (len(one.requests), len(other.requests)) == (1, 1)


@pytest.mark.parametrize("last", [DEAD_ENGINE, delta("{}", '"abort"')], ids=["a dead engine", "an abort"])
async def test_only_events_that_were_sent_are_counted_of_a_read_with_a_failure(last: bytes) -> None:
    async def fails(talk: Conversation) -> None:
        if talk.number > 1:
            await talk.respond(b"{}", "500 Internal Server Error")
            return
        await talk.begin_stream()
        await talk.chunk(ROLE + HELLO)
        await talk.chunk(HELLO + last + DONE)
        await talk.end_stream()

    async with scripted(fails) as server, serving([model(server.port, server.port)]) as served:
        reply = await request_once(served.port, request(chat(stream=True, temperature=0)))
        assert (reply.status, reply.body.count(HELLO)) == (200, 2)
        [record] = served.context.records
        assert {(each.outcome, each.lost_tokens) for each in record.continuations} == {("failed", 3)}
