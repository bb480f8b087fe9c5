"""One settlement: however a request ends, limits, ledger, metrics and the request's record show the same tokens and the same cost."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack, closing
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.api.settlement import BYTES_PER_TOKEN, Method
from gateway.api.usage import Usage
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import UsageRow, decode, frames
from gateway.limits import decision, windows
from gateway.snapshot.money import cost_of
from gateway.snapshot.snapshot import Allowance, Limits
from gateway.telemetry.metrics import Series, sum_series
from tests.gateway.proxy.test_form import FILE, MODEL, form, part
from tests.support.examples import examples
from tests.support.money import price
from tests.support.running import key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.way import Way, way
from tests.support.wire import DONE, STREAM_HEAD, chat, request, request_once

PRICE = price(0.1, 0.3, cached=0.05, reasoning=0.7)
HOLDER = Allowance("key team-a", Limits(tokens_per_day=10**9, cost_per_day=10**15))
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
KINDS = ("prompt", "completion", "cached", "reasoning")

counts = st.integers(0, 5000)
usages = st.builds(
    lambda prompt, completion, cached, reasoning: Usage(prompt, completion, min(cached, prompt), min(reasoning, completion)),
    counts, counts, counts, counts,
)  # fmt: skip


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def event(document: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(document)


def token(index: int, usage: Usage | None) -> bytes:
    """Return an event of a choice, with its running usage as vLLM writes it."""
    choice = {"index": index, "delta": {"content": "a token of a stream"}, "finish_reason": None}
    return event({"id": "chatcmpl-1", "choices": [choice], **({} if usage is None else {"usage": usage_object(usage)})})


def message(kind: str, **fields: Any) -> bytes:
    return b"event: %b\n%b" % (kind.encode(), event({"type": kind, **fields}))


class Settlements(RuleBasedStateMachine):
    """Requests that end in all ways, one after the other, on one worker with a ledger and a limited key."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = ExitStack()
        self.rows: list[UsageRow] = []
        self.records = 0
        self.run(self.start())

    def run(self, steps: Any) -> None:
        self.runner.run(steps)

    async def start(self) -> None:
        self.journal = Journal.create("test", 1 << 16, 8)
        self.stack.callback(self.journal.close)
        self.one = self.stack.enter_context(way(key(allowances=(HOLDER,)), model(1, price=PRICE)))
        self.one.server_wire.close()  # each request has its own; a count of a prompt would wait for this one
        ledger = self.one.context.ledger = Recorder(self.journal)
        ledger.apply_snapshot(self.one.worker.snapshot)

    def teardown(self) -> None:
        async def end() -> None:
            self.stack.close()

        self.run(end())
        self.runner.close()

    async def exchange(self, path: str, body: dict[str, Any], reads: list[bytes], end: str) -> None:
        """Relay a response that arrives in these reads. Then its client or its server closes the connection first."""
        one = Way(self.one.worker, self.one.context, self.one.counters)
        one.client.data_received(request(body, path))
        one.write_batch.flush()
        for each in reads:
            if not one.server_wire.is_closing():
                one.server_wire.receive(each)
                one.write_batch.flush()
        for side in (one.client, one.server) if end == "client" else (one.server, one.client):
            side.connection_lost(None)
        self.records += 1
        await until(lambda: len(one.context.records) == self.records)
        batch = self.journal.read()
        self.journal.release(batch)
        self.rows += [decode(payload) for payload in frames(batch.data)]

    @rule(usage=st.none() | usages, status=st.sampled_from(["200 OK", "400 Bad Request", "500 Internal Server Error"]), cut=st.booleans())
    def receive_json(self, usage: Usage | None, status: str, cut: bool) -> None:
        document = {"id": "chatcmpl-1", "choices": [], **({} if usage is None else {"usage": usage_object(usage)})}
        text = orjson.dumps(document)
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode()
        self.run(self.exchange(PATHS["chat"], chat(), [head + text[: len(text) // 2 if cut else None]], "server"))

    @rule(
        kind=st.sampled_from(["chat", "completions"]),
        choices=st.integers(1, 3),
        tokens=st.lists(st.tuples(st.integers(0, 2), st.none() | usages), max_size=8),
        final=st.none() | usages,
        fails=st.booleans(),
        complete=st.booleans(),
        end=st.sampled_from(["client", "server"]),
        together=st.booleans(),
    )
    def receive_stream(
        self,
        kind: str,
        choices: int,
        tokens: list[tuple[int, Usage | None]],
        final: Usage | None,
        fails: bool,
        complete: bool,
        end: str,
        together: bool,
    ) -> None:
        events = [token(index % choices, usage) for index, usage in tokens]
        events += [event({"error": {"message": "the engine failed", "code": 500}})] if fails else []
        events += [event({"choices": [], "usage": usage_object(final)})] if final is not None else []
        events += [DONE] if complete else []
        chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in events] + ([b"0\r\n\r\n"] if complete else [])
        body = {"model": "tiny", "prompt": "Hello", "n": choices} if kind == "completions" else chat(n=choices)
        reads = [STREAM_HEAD + b"".join(chunks)] if together else [STREAM_HEAD, *chunks]
        self.run(self.exchange(PATHS[kind], {**body, "stream": True}, reads, end))

    @rule(
        prompt=usages, deltas=st.integers(0, 5), final=st.none() | usages, complete=st.booleans(), end=st.sampled_from(["client", "server"])
    )
    def receive_messages(self, prompt: Usage, deltas: int, final: Usage | None, complete: bool, end: str) -> None:
        events = [message("message_start", message={"usage": {"input_tokens": prompt.prompt, "output_tokens": 0}})]
        events += [message("content_block_start", index=0, content_block={"type": "text", "text": ""})]
        events += [message("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})] * deltas
        if final is not None:
            events.append(message("message_delta", delta={}, usage={"input_tokens": final.prompt, "output_tokens": final.completion}))
        events += [message("message_stop")] if complete else []
        chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in events] + ([b"0\r\n\r\n"] if complete else [])
        body = {**chat(stream=True), "max_tokens": 100}
        self.run(self.exchange(PATHS["messages"], body, [STREAM_HEAD, *chunks], end))

    @rule(deltas=st.integers(0, 5), final=st.none() | usages, end=st.sampled_from(["client", "server"]))
    def receive_responses(self, deltas: int, final: Usage | None, end: str) -> None:
        """The server refuses the connection that would count the prompt of a truncated stream."""
        events = [message("response.created", response={"status": "in_progress", "usage": None})]
        events += [message("response.output_item.added", item={"type": "function_call", "status": "in_progress"})]
        events += [message("response.function_call_arguments.delta", delta="a")] * deltas
        if final is not None:
            usage = {"input_tokens": final.prompt, "output_tokens": final.completion}
            events.append(message("response.completed", response={"status": "completed", "usage": usage}))
        chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in events] + ([b"0\r\n\r\n"] if final is not None else [])
        self.run(self.exchange(PATHS["responses"], {"model": "tiny", "input": "Hello", "stream": True}, [STREAM_HEAD, *chunks], end))

    @rule()
    def leave_before_the_response(self) -> None:
        self.run(self.exchange(PATHS["chat"], chat(), [], "client"))

    @invariant()
    def every_report_shows_the_same(self) -> None:
        context = self.one.context
        assert len(self.rows) == self.records == len(context.records)
        for row, record in zip(self.rows, context.records, strict=True):
            usage = record.usage
            expected = (None,) * 4 if usage is None else (usage.prompt, usage.completion, usage.cached, usage.reasoning)
            assert (row.prompt, row.completion, row.cached, row.reasoning) == expected
            assert row.estimated_by == record.estimated_by and row.cost == (0 if usage is None else cost_of(usage, PRICE))
        charged = [record.usage for record in context.records if record.usage is not None]
        series = sum_series([self.one.counters])
        for kind in KINDS:
            counted = series.get(Series("tokens_total", ("team-a", "tiny", kind)), [0.0])[0]
            assert counted == sum(getattr(usage, kind) for usage in charged)
        buckets = context.limiter.buckets
        day = buckets.holder(HOLDER.holder, HOLDER.limits).offset + decision.DAY
        assert buckets.cells[day + windows.USED] == sum(usage.prompt + usage.completion for usage in charged)
        assert buckets.cells[day + windows.SPENT] == sum(row.cost or 0 for row in self.rows)


TestSettlements = Settlements.TestCase
TestSettlements.settings = settings(max_examples=examples(100), stateful_step_count=12, deadline=None)


REPORTED = Usage(50, 40, 10, 5)
BODY_END = b'"usage":' + orjson.dumps(usage_object(REPORTED)) + b"}"
BODIES = {
    "chat": b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"a text of some \\"tokens\\""}}],' + BODY_END,
    "completions": b'{"id":"c","choices":[{"index":0,"text":"a text of some tokens"}],' + BODY_END,
    "responses": b'{"id":"c","output":[{"type":"message","content":[{"type":"output_text","text":"a text"}]}],' + BODY_END,
    "messages": b'{"id":"c","type":"message","content":[{"type":"text","text":"a text"}],' + BODY_END,
}
MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}
INPUTS: dict[str, dict[str, Any]] = {"chat": MESSAGES, "messages": MESSAGES, "completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}
LIMITED = key(allowances=(HOLDER,))


def charge_of(kind: str, reads: list[bytes], later: list[bytes]) -> tuple[Usage | None, Method | None]:
    """Return what a client pays that disconnects after these reads of a response. ``later``: what the gateway reads afterwards."""

    async def settled() -> tuple[Usage | None, Method | None]:
        with way(LIMITED) as first:
            first.server_wire.close()
            one = Way(first.worker, first.context, first.counters)
            one.client.data_received(request({"model": "tiny", **INPUTS[kind]}, PATHS[kind]))
            one.write_batch.flush()
            for each in reads:
                one.server_wire.receive(each)
                one.write_batch.flush()
            one.client.connection_lost(None)
            for each in later:
                if not one.server_wire.is_closing():
                    one.server_wire.receive(each)
            one.server.connection_lost(None)
            await until(lambda: len(one.context.records) == 1)
            (record,) = one.context.records
            buckets = one.context.limiter.buckets
            day = buckets.holder(HOLDER.holder, HOLDER.limits).offset + decision.DAY
            used = record.usage or Usage()
            assert buckets.cells[day + windows.USED] == used.prompt + used.completion
            return record.usage, record.estimated_by

    return asyncio.run(settled())


def framed(framing: str, pieces: list[bytes], size: int) -> list[bytes]:
    """Return the reads of a response whose body arrives in these pieces."""
    lines = {"length": b"content-length: %d\r\n" % size, "chunked": b"transfer-encoding: chunked\r\n", "close": b""}[framing]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n" % lines
    return [head, *(b"%x\r\n%b\r\n" % (len(piece), piece) if framing == "chunked" else piece for piece in pieces)]


@settings(deadline=None)
@given(
    kind=st.sampled_from(sorted(BODIES)),
    framing=st.sampled_from(["length", "chunked", "close"]),
    position=st.floats(0, 1, exclude_max=True),
    rest=st.floats(0, 1),
    dice=st.randoms(use_true_random=False),
)
def test_the_charge_of_a_truncated_body_depends_only_on_its_bytes(kind: str, framing: str, position: float, rest: float, dice: Any) -> None:
    body = BODIES[kind]
    at = 1 + int(position * (len(body) - 1))
    end = at + int(rest * (len(body) - at))
    sent, later = (framed(framing, pieces(text, dice), len(body)) for text in (body[:at], body[at:end]))
    usage, method = charge_of(kind, sent, later[1:])
    if end >= len(body) - 1:  # a scanner has the usage before the last brace
        assert (usage, method) == (REPORTED, None)
    else:
        assert usage is not None and (usage.completion, method) == (max(at // BYTES_PER_TOKEN, 1), Method.BYTES) and usage.prompt > 0


def pieces(text: bytes, dice: Any) -> list[bytes]:
    cuts = sorted({0, len(text), *(dice.randint(0, len(text)) for _ in range(dice.randint(0, 6)))})
    return [text[start:stop] for start, stop in itertools.pairwise(cuts)]


async def test_a_stream_that_is_closed_before_its_end_costs_its_prompt_and_what_was_sent() -> None:
    """5,010 prompt tokens at 1 and 98 of 100 completion tokens at 3 per million."""
    with closing(Journal.create("test", 1 << 16, 8)) as journal, way(served=model(1, price=price(1.0, 3.0))) as one:
        ledger = one.context.ledger = Recorder(journal)
        ledger.apply_snapshot(one.worker.snapshot)
        sent = [token(0, Usage(5010, number)) for number in range(99)]
        received = one.streamed([STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(each), each) for each in sent)], include_usage=False)
        assert received.count(b"data: ") == 99 and b"usage" not in received
        one.client.eof_received()
        (row,) = [decode(payload) for payload in frames(journal.read().data)]
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", 5010, 98, None)
    assert row.cost == 5_304_000


@pytest.mark.parametrize("limits", [Limits(), Limits(requests_per_minute=100), Limits(tokens_per_day=10**6)])
async def test_a_stream_without_usage_is_estimated_for_the_ledger_whatever_the_limits_count(limits: Limits) -> None:
    with closing(Journal.create("test", 1 << 16, 8)) as journal, way(key(allowances=(Allowance("key team-a", limits),))) as one:
        ledger = one.context.ledger = Recorder(journal)
        ledger.apply_snapshot(one.worker.snapshot)
        sent = [*[token(0, None)] * 4, DONE]
        one.streamed([STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(each), each) for each in sent), b"0\r\n\r\n"], include_usage=False)
        (row,) = [decode(payload) for payload in frames(journal.read().data)]
    assert (row.status, row.incomplete, row.completion, row.estimated_by) == (200, None, 4, Method.EVENTS)


async def sends_a_stream_without_usage(talk: Conversation) -> None:
    await talk.begin_stream()
    for _ in range(4):
        await talk.chunk(token(0, None))
    await talk.chunk(DONE)
    await talk.end_stream()


LARGE = request(chat(stream=True, messages=[{"role": "user", "content": "word " * 300_000}]))
TRANSCRIPTION = form(MODEL, part("stream", b"true"), FILE)


@pytest.mark.parametrize(
    ("sent", "least", "most"),
    [
        pytest.param(LARGE, len(LARGE) // BYTES_PER_TOKEN - 300, len(LARGE) // BYTES_PER_TOKEN, id="a large body, by its length"),
        pytest.param(TRANSCRIPTION, 1, 1, id="a form, which has no text"),
    ],
)
async def test_the_prompt_of_a_stream_without_usage_is_estimated_without_parsing(sent: bytes, least: int, most: int) -> None:
    with closing(Journal.create("test", 1 << 16, 8)) as journal:
        async with scripted(sends_a_stream_without_usage) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
            reply = await request_once(served.port, sent)
            assert (reply.status, reply.body) == (200, token(0, None) * 4 + DONE)
            await until(lambda: len(served.context.records) == 1)
        (row,) = [decode(payload) for payload in frames(journal.read().data)]
    assert (row.status, row.incomplete, row.estimated_by) == (200, None, Method.EVENTS)
    assert row.prompt is not None and least <= row.prompt <= most


async def test_an_event_without_counts_is_added_to_the_running_usage() -> None:
    with closing(Journal.create("test", 1 << 16, 8)) as journal, way() as one:
        ledger = one.context.ledger = Recorder(journal)
        ledger.apply_snapshot(one.worker.snapshot)
        sent = [token(0, Usage(50, 0)), token(0, Usage(50, 1)), token(0, None), token(0, None)]
        one.streamed([STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(each), each) for each in sent)], include_usage=False)
        one.client.eof_received()
        (row,) = [decode(payload) for payload in frames(journal.read().data)]
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", 50, 3, Method.EVENTS)


async def test_a_request_without_a_model_is_charged_for_nothing() -> None:
    async with scripted(sends_a_stream_without_usage) as server, serving([model(server.port)], [LIMITED]) as served:
        reply = await request_once(served.port, request(chat(model="nothing")))
        assert reply.status == 404
        await until(lambda: len(served.context.records) == 1)
        (record,) = served.context.records
        assert (record.status, record.usage, record.estimated_by) == (404, None, None)
        assert (await request_once(served.port, request(chat(stream=True)))).status == 200
        await until(lambda: len(served.context.records) == 2)
        assert served.context.records[1].usage is not None
