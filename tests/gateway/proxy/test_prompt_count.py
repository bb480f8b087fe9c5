"""The prompt of a truncated request is counted by its server, after the client has gone, and only if something charges for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from gateway.api.settlement import BYTES_PER_TOKEN, Method
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import UsageRow, decode, frames
from gateway.limits.decision import DAY
from gateway.limits.windows import USED
from gateway.proxy.prompt_count import LARGEST
from gateway.snapshot.snapshot import Allowance, Limits, Queue
from tests.support.running import Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DONE, HELLO, ROLE, STOP, Client, chat, client, request
from upstream.balancing.attempt import UpstreamResponse
from upstream.balancing.side_requests import AT_ONCE

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
RENDER, TOKENIZE, COUNT_TOKENS = "/v1/responses/render", "/tokenize", "/v1/messages/count_tokens"
LIMITED = key(allowances=(Allowance("key team-a", Limits(tokens_per_day=10**6)),))
BODY = {"model": "tiny", "input": "Hello", "stream": True}
COUNTED = orjson.dumps({"count": 41, "max_model_len": 2048, "tokens": [1] * 41, "token_strs": None})
FORBIDDEN = b'{"error":{"message":"Scale-out endpoints are disabled.","type":"PermissionDeniedError","code":403}}'


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def opened(kind: str = "message") -> list[bytes]:
    return [
        event("response.output_item.added", item={"type": kind, "status": "in_progress"}),
        event("response.content_part.added", part={"type": "output_text"}),
    ]


def closed(kind: str = "message") -> list[bytes]:
    return [
        event("response.output_text.done", text="aaa"),
        event("response.content_part.done", part={"type": "output_text"}),
        event("response.output_item.done", item={"type": kind, "status": "completed"}),
    ]


BEGUN = [event(f"response.{kind}", response={"status": "in_progress", "usage": None}) for kind in ("created", "in_progress")]
OPENING = [*BEGUN, *opened()]
DELTA = event("response.output_text.delta", delta="a")
THINKING = [
    event("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 0}}),
    event("content_block_start", content_block={"type": "thinking"}),
]
TEXT_DELTA = event("content_block_delta", delta={"type": "text_delta", "text": "a"})
THOUGHT = [event("content_block_delta", delta={"type": "signature_delta", "signature": "s"}), event("content_block_stop")]


@dataclass
class Engine:
    """A server that sends the events of a stream and then nothing, and counts prompts by these responses, by path."""

    events: list[bytes]
    counts: dict[str, tuple[str, bytes]] = field(
        default_factory=lambda: {RENDER: ("403 Forbidden", FORBIDDEN), TOKENIZE: ("200 OK", COUNTED)}
    )
    waits: set[str] = field(default_factory=set)
    counting: int = 0
    counted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """The requests that count, by path and body."""
    may_count: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: int = 0

    async def __call__(self, talk: Conversation) -> None:
        path = talk.request.head.split(b" ")[1].decode()
        if path in (CHAT, RESPONSES, MESSAGES):
            self.arrived += 1
            if self.events:
                await talk.begin_stream()
                for each in self.events:
                    await talk.chunk(each)
            await talk.closed_by_peer()
            return
        self.counted.append((path, talk.request.json))
        if path in self.waits:
            self.counting += 1
            await self.may_count.wait()
        status, body = self.counts[path]
        await talk.respond(body, status)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.counted]


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.create("test", 1 << 20, 64)
    yield made
    made.close()


def rows(journal: Journal) -> list[UsageRow]:
    reading = journal.read()
    journal.release(reading)
    return [decode(payload) for payload in frames(reading.data)]


async def disconnect_after(one: Client, engine: Engine, body: dict[str, Any], path: str = RESPONSES) -> None:
    """Send a request, and disconnect when all events of its stream have been received."""
    arrived = engine.arrived
    one.send(request(body, path))
    if engine.events:
        await one.events(len(engine.events))
    else:
        await until(lambda: engine.arrived > arrived)
    one.disconnect()


async def settled(served: Served, count: int = 1) -> None:
    await until(lambda: len(served.context.records) == count)


def used(served: Served) -> float:
    """The tokens of the day that the key's limits have counted."""
    buckets = served.context.limiter.buckets
    allowance = LIMITED.allowances[0]
    return float(buckets.cells[buckets.holder(allowance.holder, allowance.limits).offset + DAY + USED])


async def test_the_prompt_of_a_truncated_stream_is_the_servers_count(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA, DELTA, DELTA])
    async with (
        scripted(engine) as server,
        serving([model(server.port, served="served")], [LIMITED], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, BODY)
        await settled(served)
        (row,), (record,) = rows(journal), served.context.records
        assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", 41, 3, Method.EVENTS)
        assert record.usage is not None and (record.usage.prompt, record.usage.completion) == (41, 3)
        assert used(served) == 44 and served.value("tokens_total", "team-a", "tiny", "prompt") == 41
        assert engine.paths == [RENDER, TOKENIZE] and served.value("prompt_counts_total", "tiny", "counted") == 1
        (_, rendered), (_, tokenized) = engine.counted
        assert (rendered["model"], rendered["input"], rendered["stream"]) == ("served", "Hello", False)
        assert (tokenized["model"], tokenized["messages"]) == ("served", [{"role": "user", "content": "Hello"}])
        assert server.requests[-1].header("authorization") == server.requests[0].header("authorization")
        assert served.in_flight == 0


@pytest.mark.parametrize(
    ("path", "events", "tokens"),
    [
        (RESPONSES, [*BEGUN, *opened("reasoning"), DELTA, DELTA, *closed("reasoning"), *opened(), DELTA], 3),
        (RESPONSES, [*BEGUN, *opened(), DELTA, *closed()], 1),
        (MESSAGES, [*THINKING, TEXT_DELTA], 1),
        (MESSAGES, [*THINKING, TEXT_DELTA, *THOUGHT, event("content_block_start", content_block={"type": "text"}), TEXT_DELTA], 2),
        (MESSAGES, [*THINKING[:1], event("content_block_start", content_block={"type": "tool_use"}), TEXT_DELTA, TEXT_DELTA], 2),
    ],
)
async def test_only_events_with_tokens_are_counted(journal: Journal, path: str, events: list[bytes], tokens: int) -> None:
    engine = Engine(events)
    body = BODY if path == RESPONSES else {**chat(stream=True), "max_tokens": 9}
    async with (
        scripted(engine) as server,
        serving([model(server.port)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, body, path)
        await settled(served)
    (row,) = rows(journal)
    assert (row.completion, row.estimated_by) == (tokens, Method.EVENTS)


async def test_a_server_that_renders_prompts_gets_one_request_and_a_refusal_is_remembered(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA])
    engine.counts[RENDER] = ("200 OK", b'{"request_id":"r","token_ids":[1,2,3],"features":null}')
    async with scripted(engine) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        for count, status in ((1, "200 OK"), (2, "403 Forbidden"), (3, "403 Forbidden")):
            engine.counts[RENDER] = (status, engine.counts[RENDER][1])
            async with client(served.port) as one:
                await disconnect_after(one, engine, BODY)
                await settled(served, count)
    assert [row.prompt for row in rows(journal)] == [3, 41, 41]
    assert engine.paths == [RENDER, RENDER, TOKENIZE, TOKENIZE]


@pytest.mark.parametrize(
    "counts", [("404 Not Found", b"{}"), ("500 Internal Server Error", b"{}"), ("200 OK", b"{}"), ("200 OK", b"<html>")]
)
async def test_without_a_count_the_prompt_is_estimated(journal: Journal, counts: tuple[str, bytes]) -> None:
    engine = Engine([*OPENING, DELTA, DELTA], {RENDER: counts, TOKENIZE: counts})
    async with (
        scripted(engine) as server,
        serving([model(server.port)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, BODY)
        await settled(served)
        assert served.value("prompt_counts_total", "tiny", "failed") == 1
    (row,) = rows(journal)
    assert row.prompt == len(orjson.dumps({**BODY, "store": False})) // 4 and (row.completion, row.estimated_by) == (2, Method.EVENTS)


async def test_a_server_that_does_not_count_in_time_ends_the_wait(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA, DELTA], waits={RENDER})
    async with (
        scripted(engine) as server,
        serving([model(server.port)], [LIMITED], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, BODY)
        await until(lambda: engine.counting == 1)
        assert not served.context.records and used(served) > 2, "the reservation is held until the settlement"
        await settled(served)
        assert served.in_flight == 0
        engine.may_count.set()
        await until(lambda: server.open == 0)
    (row,) = rows(journal)
    assert (row.completion, row.estimated_by) == (2, Method.EVENTS) and engine.paths == [RENDER]


async def test_counts_are_bounded_and_the_others_wait(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA], waits={RENDER})
    total = 2 * AT_ONCE
    async with scripted(engine) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:

        async def one_client() -> None:
            async with client(served.port) as one:
                await disconnect_after(one, engine, BODY)

        await asyncio.gather(*(one_client() for _ in range(total)))
        await until(lambda: engine.counting >= AT_ONCE)
        assert engine.counting == AT_ONCE
        engine.may_count.set()
        await settled(served, total)
        assert served.in_flight == 0
    assert len(rows(journal)) == total


async def test_a_stream_that_its_server_truncates_is_counted_before_its_client_gets_the_error(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA, DELTA])
    async with (
        scripted(engine) as server,
        serving([model(server.port)], [LIMITED], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request(BODY, RESPONSES))
        await one.events(6)
        server.hang_up()
        assert b"error" in await one.reader.readuntil(b"\r\n0\r\n\r\n")
        assert used(served) == 43
        await settled(served)
    (row,) = rows(journal)
    assert (row.status, row.incomplete, row.prompt, row.completion) == (200, "upstream", 41, 2)


async def test_nothing_is_counted_for_a_request_that_nothing_charges() -> None:
    engine = Engine([*OPENING, DELTA])
    requests_only = key(allowances=(Allowance("key team-a", Limits(requests_per_minute=100)),))
    async with scripted(engine) as server, serving([model(server.port)], [requests_only]) as served, client(served.port) as one:
        await disconnect_after(one, engine, BODY)
        await settled(served)
        assert served.context.records[0].usage is None and not engine.counted and served.total("prompt_counts_total") == 0


async def test_a_running_usage_or_a_reported_prompt_needs_no_count(journal: Journal) -> None:
    running = b'{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2}}'
    streams = {
        CHAT: ([b"data: %b\n\n" % running], chat(stream=True)),
        MESSAGES: ([THINKING[0], event("content_block_start"), TEXT_DELTA], {**chat(stream=True), "max_tokens": 9}),
    }
    for path, (events, body) in streams.items():
        engine = Engine(events)
        async with (
            scripted(engine) as server,
            serving([model(server.port)], ledger=Recorder(journal)) as served,
            client(served.port) as one,
        ):
            await disconnect_after(one, engine, body, path)
            await settled(served)
            assert not engine.counted
        assert [row.prompt for row in rows(journal)] == [9]


async def row_without_running_usage(engine: Engine, journal: Journal) -> UsageRow:
    """Return the row of a stream whose server sends no running usage, after its client has disconnected."""
    async with (
        scripted(engine) as server,
        serving([model(server.port, running_usage=False)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, chat(stream=True), CHAT)
        await settled(served)
    (row,) = rows(journal)
    return row


async def test_a_stream_without_running_usage_has_the_exact_prompt(journal: Journal) -> None:
    engine = Engine([ROLE, HELLO, HELLO])
    engine.counts["/v1/chat/completions/render"] = engine.counts[RENDER]
    row = await row_without_running_usage(engine, journal)
    assert (row.prompt, row.completion, row.estimated_by) == (41, 2, Method.EVENTS)


@pytest.mark.parametrize("bills", [False, True])
@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), (CHAT, False), (RESPONSES, True), (MESSAGES, True)])
async def test_a_request_that_is_cancelled_before_its_first_event(journal: Journal, path: str, stream: bool, bills: bool) -> None:
    engine = Engine([], {f"{path}/render": ("403 Forbidden", FORBIDDEN), TOKENIZE: ("200 OK", COUNTED)})
    engine.counts[COUNT_TOKENS] = ("200 OK", b'{"input_tokens":41}')
    body = {"model": "tiny", "input": "Hello"} if path == RESPONSES else {**chat(), "max_tokens": 9}
    async with (
        scripted(engine) as server,
        serving([model(server.port)], [LIMITED], ledger=Recorder(journal), bill_cancelled_prefill=bills) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, {**body, "stream": stream}, path)
        await settled(served)
        (row,) = rows(journal)
        if bills:
            assert (row.prompt, row.completion, row.estimated_by) == (41, 0, Method.TOKENIZE) and used(served) == 41
        else:
            assert (row.prompt, row.completion, row.estimated_by) == (None, None, None) and used(served) == 0
            assert not engine.counted
        assert (row.status, row.incomplete) == (499, "client")


async def test_a_cancelled_request_without_a_count_costs_nothing(journal: Journal) -> None:
    engine = Engine([], {})
    body = {**chat(), "documents": [], "messages": [{"role": "user", "content": "x" * LARGEST}]}
    async with (
        scripted(engine) as server,
        serving([model(server.port)], ledger=Recorder(journal), bill_cancelled_prefill=True) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, body, CHAT)
        await settled(served)
        assert not engine.counted and served.value("prompt_counts_total", "tiny", "unsupported") == 1
    (row,) = rows(journal)
    assert (row.prompt, row.estimated_by) == (None, None)


async def test_a_request_that_no_server_has_received_is_not_counted(journal: Journal) -> None:
    engine = Engine([])
    async with (
        scripted(engine) as server,
        serving(
            [model(server.port, max_inflight=1, queue=Queue(5, 60.0))], ledger=Recorder(journal), bill_cancelled_prefill=True
        ) as served,
        client(served.port) as first,
        client(served.port) as second,
    ):
        first.send(request(BODY, RESPONSES))
        await until(lambda: engine.arrived == 1)
        second.send(request(BODY, RESPONSES))
        await until(lambda: served.value("queued_requests", "tiny") == 1)
        second.disconnect()
        await settled(served)
        (row,) = rows(journal)
        assert (row.status, row.prompt) == (499, None) and not engine.counted


async def test_a_large_body_is_counted_too(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA])
    async with scripted(engine) as server, serving([model(server.port)], ledger=Recorder(journal)) as served, client(served.port) as one:
        await disconnect_after(one, engine, {**BODY, "input": "Hello " * 50_000})
        await settled(served)
    (row,) = rows(journal)
    assert row.prompt == 41 and engine.counted[-1][1]["messages"] == [{"role": "user", "content": "Hello " * 50_000}]


async def test_a_drained_stream_is_counted_before_its_client_gets_the_error(journal: Journal) -> None:
    engine = Engine([*OPENING, DELTA, DELTA], waits={RENDER})
    async with scripted(engine) as server, serving([model(server.port)], ledger=Recorder(journal)) as served, client(served.port) as one:
        one.send(request(BODY, RESPONSES))
        await one.events(6)
        for handler in tuple(served.inline_tasks):
            handler.cancel()
        await until(lambda: engine.counting == 1)
        engine.may_count.set()
        assert b"draining" in await one.reader.readuntil(b"draining")
        await settled(served)
    (row,) = rows(journal)
    assert (row.incomplete, row.prompt, row.completion) == ("drain", 41, 2)


@pytest.mark.parametrize("bills", [False, True])
async def test_a_stream_without_tokens_is_a_prompt_that_may_not_be_computed(journal: Journal, bills: bool) -> None:
    engine = Engine(OPENING)
    async with (
        scripted(engine) as server,
        serving([model(server.port)], ledger=Recorder(journal), bill_cancelled_prefill=bills) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, BODY)
        await settled(served)
        assert bool(engine.counted) is bills
    (row,) = rows(journal)
    assert (row.prompt, row.completion, row.estimated_by) == ((41, 0, Method.TOKENIZE) if bills else (None, None, None))


async def test_a_prompt_that_the_stream_has_reported_is_not_counted_again(journal: Journal) -> None:
    engine = Engine(THINKING[:1])
    async with (
        scripted(engine) as server,
        serving([model(server.port)], ledger=Recorder(journal), bill_cancelled_prefill=True) as served,
        client(served.port) as one,
    ):
        await disconnect_after(one, engine, {**chat(stream=True), "max_tokens": 9}, MESSAGES)
        await settled(served)
        assert not engine.counted
    (row,) = rows(journal)
    assert (row.prompt, row.completion, row.estimated_by) == (9, 0, None)


@pytest.mark.parametrize("bills", [False, True])
@pytest.mark.parametrize("translated", [False, True])
async def test_a_part_of_a_body_counts_for_the_client_that_was_sent_it(journal: Journal, translated: bool, bills: bool) -> None:
    """A response that is translated is sent as a whole. So its client has received nothing."""
    text = b'{"choices":[{"message":{"content":"' + b"x" * 100
    engine = Engine([], {f"{CHAT}/render": ("403 Forbidden", FORBIDDEN), TOKENIZE: ("200 OK", COUNTED)})

    async def script(talk: Conversation) -> None:
        if talk.request.head.startswith(b"POST %b " % CHAT.encode()):
            await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n" + text)
            await talk.closed_by_peer()
        else:
            await engine(talk)

    def is_relayed() -> bool:
        watched = [each for each in served.context.deadlines._watched if isinstance(each, UpstreamResponse)]
        return any(each._sink is not None for each in watched)

    async with (
        scripted(script) as server,
        serving([model(server.port)], ledger=Recorder(journal), bill_cancelled_prefill=bills) as served,
        client(served.port) as one,
    ):
        body = chat(functions=[{"name": "f", "parameters": {}}]) if translated else chat()
        one.send(request(body, CHAT))
        await until(is_relayed)
        one.disconnect()
        await until(lambda: not served.connections)
        server.hang_up()  # otherwise the rest of the body would be awaited for its usage
        await settled(served)
        assert bool(engine.counted) is (translated and bills)
    (row,) = rows(journal)
    if not translated:
        assert (row.completion, row.estimated_by) == (len(text) // BYTES_PER_TOKEN, Method.BYTES) and row.prompt
    else:
        assert (row.prompt, row.estimated_by) == ((41, Method.TOKENIZE) if bills else (None, None))


async def test_a_limited_key_without_a_ledger_is_counted_too() -> None:
    engine = Engine([*OPENING, DELTA, DELTA])
    async with scripted(engine) as server, serving([model(server.port)], [LIMITED]) as served, client(served.port) as one:
        await disconnect_after(one, engine, BODY)
        await settled(served)
        assert used(served) == 43 and engine.paths == [RENDER, TOKENIZE]


async def test_a_key_without_limits_and_a_ledger_needs_no_count() -> None:
    engine = Engine([*OPENING, DELTA])
    async with scripted(engine) as server, serving([model(server.port)]) as served, client(served.port) as one:
        await disconnect_after(one, engine, BODY)
        await settled(served)
        (record,) = served.context.records
        assert (record.status, record.incomplete, record.detail) == (499, "client", None) and not engine.counted


async def test_a_stream_that_its_client_has_received_completely_needs_no_count(journal: Journal) -> None:
    """The server has not ended its body when the client disconnects."""
    engine = Engine([ROLE, HELLO, STOP, DONE])
    engine.counts[f"{CHAT}/render"] = engine.counts[RENDER]
    row = await row_without_running_usage(engine, journal)
    assert not engine.counted
    assert (row.status, row.incomplete, row.completion, row.estimated_by) == (200, None, 3, Method.EVENTS)
