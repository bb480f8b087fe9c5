"""The fast path of a chunk and the general path account for a stream in the same way."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from time import monotonic
from typing import Any, cast

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.response_fields import is_ordinary
from gateway.api.routes import Dialect
from gateway.api.usage import Usage
from gateway.client.request import ClientRequest
from gateway.continuation.sent_text import SentText
from gateway.continuation.token_record import TokenRecord
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import decode
from gateway.proxy.event_template import TemplateLearner
from gateway.proxy.fast_path import FastPath
from gateway.proxy.running_usage import RunningUsage
from gateway.proxy.token_chunks import TextRecorder
from gateway.telemetry.metrics import CHUNK_GAPS, ReadGaps
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.continuation.streams import Server
from tests.gateway.continuation.test_regeneration import DICE, SERVERS
from tests.gateway.proxy.test_event_template import describes
from tests.support.examples import examples
from tests.support.rows import each_row
from tests.support.running import model
from tests.support.way import Way, unchunked, way
from tests.support.wire import COUNT, DONE, ROLE, STREAM_HEAD
from upstream.balancing.attempt import UpstreamResponse
from upstream.http.chunked import ChunkedDecoder
from upstream.http.connection import Connection
from upstream.http.sse import data_of
from upstream.http.write_batching import WriteBatch

EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
TEXTS = (b"a", b"", b"b" * 300, b"error", b"usage", b"an error" * 3, b'\\"', b"\\\\", b'\\\\\\"', b"\\n", b"c" * 3000)
"""Ordinary texts, texts like the marks, texts with escapes, and a text that is too long for the fast path."""
EVENTS = (*(EVENT % text for text in TEXTS), b": a comment\n\n", COUNT)
PROMPT = 9


def with_usage(event: bytes, completion: int, end: bytes = b"") -> bytes:
    """Add vLLM's running usage to an event of a choice."""
    if not event.endswith(b"}]}\n\n"):
        return event
    counts = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (PROMPT, PROMPT + completion, completion, end)
    return event.removesuffix(b"}\n\n") + b',"usage":' + counts + b"}\n\n"


def frame(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def relayed(one: Way, events: Sequence[bytes], *, cut: bool, include_usage: bool) -> tuple[bytes, RequestRecord]:
    """Relay a stream with one event in each chunk. ``cut``: each chunk arrives in two reads, so that no chunk takes the fast path."""
    reads = [STREAM_HEAD]
    for event in events:
        chunk = frame(event)
        reads += [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]] if cut else [chunk]
    body = unchunked(one.streamed([*reads, b"0\r\n\r\n"], include_usage))
    return body, one.context.records.pop()


async def compare(events: Sequence[bytes], include_usage: bool) -> None:
    with way() as one:
        fast_body, fast = relayed(one, events, cut=False, include_usage=include_usage)
        general_body, general = relayed(one, events, cut=True, include_usage=include_usage)
    assert fast_body == general_body
    assert (fast.response_bytes, fast.usage, fast.incomplete) == (general.response_bytes, general.usage, None)
    assert fast.gaps is not None and general.gaps is not None
    assert fast.gaps.events == general.gaps.events == len(events)
    assert sum(fast.gaps.counts) == sum(general.gaps.counts) == len(events) - 1, "a gap for each read after the first"


@settings(max_examples=examples(50), deadline=None)
@given(middle=st.lists(st.sampled_from(EVENTS), max_size=24), include_usage=st.booleans())
def test_both_paths_account_for_a_stream_alike(middle: list[bytes], include_usage: bool) -> None:
    asyncio.run(compare((ROLE, *middle, COUNT, DONE), include_usage))


DETAILS = (b"", b',"completion_tokens_details":null', b',"completion_tokens_details":{"reasoning_tokens":1}')


@settings(max_examples=examples(50), deadline=None)
@given(middle=st.lists(st.sampled_from(EVENTS[:-1]), max_size=24), left=st.integers(0, 24), end=st.sampled_from(DETAILS))
def test_the_running_usage_is_counted_and_hidden_on_both_paths(middle: list[bytes], left: int, end: bytes) -> None:
    asyncio.run(compare_counted((ROLE, *middle), left, end))


async def compare_counted(events: Sequence[bytes], left: int, end: bytes) -> None:
    """Relay a stream that its server truncates after some events, with and without the fast path."""
    events = events[: left + 1]
    counted = [with_usage(event, 2 * number, end) for number, event in enumerate(events)]
    latest = max(number for number, event in enumerate(events) if event.endswith(b"}]}\n\n"))
    records = []
    for cut in (False, True):
        with closing(Journal.create("test", 1 << 16, 8)) as journal, way() as one:
            one.context.ledger = Recorder(journal)
            reads = [STREAM_HEAD]
            for event in counted:
                chunk = frame(event)
                reads += [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]] if cut else [chunk]
            sent = one.streamed(reads, False)
            one.context.ledger.tick()
            (open_row,) = journal.open_rows()
            one.server.connection_lost(None)
            one.write_batch.flush()
            sent += one.client_wire.take()
            body = unchunked(sent)
            assert body.startswith(b"".join(events)), "the bytes of a server that was not asked for the counts"
            assert body.removeprefix(b"".join(events)).count(b"data:") == 2, "the error, and the end"
            record = one.context.records.pop()
            assert record.usage == Usage(PROMPT, 2 * latest, 0, record.usage.reasoning if record.usage else 0)
            assert (record.estimated_by, record.incomplete) == (None, "upstream")
            row = decode(open_row)
            assert (row.completion, row.estimated_by) == (2 * latest, "journal"), "what the journal would say of a worker that died"
            records.append(record)
    fast, general = records
    assert (fast.response_bytes, fast.usage) == (general.response_bytes, general.usage)
    assert fast.gaps is not None and general.gaps is not None and fast.gaps.events == general.gaps.events == len(events)


def with_ids(event: bytes, ids: bytes) -> bytes:
    """Add token IDs to an event of a choice, as vLLM does for a client that requests them. Without IDs, it writes null."""
    return event.replace(b"}}]", b'},"logprobs":null,"finish_reason":null,"token_ids":%b}]' % ids) if event.endswith(b"}}]}\n\n") else event


@settings(max_examples=examples(60), deadline=None)
@given(
    middle=st.lists(st.tuples(st.sampled_from(EVENTS), st.lists(st.integers(0, 200_000), min_size=1, max_size=3)), max_size=24),
    counted=st.booleans(),
    end=st.sampled_from(DETAILS),
)
def test_the_token_ids_are_recorded_and_hidden_on_both_paths(middle: list[tuple[bytes, list[int]]], counted: bool, end: bytes) -> None:
    asyncio.run(compare_recorded(middle, counted, end))


async def compare_recorded(middle: Sequence[tuple[bytes, list[int]]], counted: bool, end: bytes) -> None:
    """Relay a stream that is recorded, with and without the fast path, and the stream of a client whose stream is not recorded."""
    ids = [number for event, found in middle if event.endswith(b"}}]}\n\n") for number in found]
    recorded = [with_ids(event, b"[%b]" % b",".join(b"%d" % each for each in found)) for event, found in middle]
    plain = [with_ids(event, b"null") for event, _ in middle]
    bodies, records = list[bytes](), list[TokenRecord]()
    for events, cut, temperature in ((recorded, False, 0), (recorded, True, 0), (plain, False, 1)):
        chunks = [with_usage(event, number, end) if counted else event for number, event in enumerate((ROLE, *events), 1)]
        with closing(Journal.create("test", 1 << 16, 8)) as journal, way(served=model(1, 2)) as one:
            for server in one.worker.fleet:
                server.scale_out = True
            if counted:
                one.context.ledger = Recorder(journal)
            reads = [STREAM_HEAD]
            for chunk in map(frame, (*chunks, DONE)):
                reads += [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]] if cut else [chunk]
            sent = one.streamed(reads, False, temperature=temperature)
            records += [cast(Any, response)._sink.__self__.record for server in one.worker.fleet for response in server.movable]
            one.server_wire.receive(b"0\r\n\r\n")
            one.write_batch.flush()
            bodies.append(unchunked(sent + one.client_wire.take()))
    assert bodies[0] == bodies[1] == bodies[2]
    assert [list(record.ids) for record in records] == [ids, ids]


FINISHED = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}\n\n'
)
FINGERPRINT = b',"system_fingerprint":"vllm-0.32.0-abc"'
ENDS = (b"", FINGERPRINT, b',"metrics":{"x":1}')
"""The fields that a server may write behind the final usage."""


@settings(max_examples=examples(60), deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), max_size=8),
    end=st.sampled_from(ENDS),
    details=st.sampled_from(DETAILS),
    counted=st.booleans(),
    cuts=st.lists(st.integers(1, 400), max_size=6),
)
def test_the_final_usage_is_hidden_however_it_is_written_and_cut(
    texts: list[bytes], end: bytes, details: bytes, counted: bool, cuts: list[int]
) -> None:
    """The client gets what the server would have sent without the request for usage: the fingerprint on the last event of the choice."""
    asyncio.run(compare_final([EVENT % text for text in texts], end, details, counted, cuts))


async def compare_final(middle: Sequence[bytes], end: bytes, details: bytes, counted: bool, cuts: Sequence[int]) -> None:
    choice_events = [ROLE, *middle, FINISHED]
    total = len(choice_events)
    sent = [with_usage(event, number, details) for number, event in enumerate(choice_events)] if counted else choice_events
    usage = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (PROMPT, PROMPT + total, total, details)
    final = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[],"usage":%b%b}\n\n' % (usage, end)
    chunks = [frame(event) for event in (*sent, final, DONE)]
    wire, at = b"".join(chunks), 0
    pieces = list[bytes]()
    for size in cuts:
        pieces.append(wire[at : at + size])
        at += size
    expected = b"".join(choice_events[:-1]) + (FINISHED[:-3] + FINGERPRINT + b"}\n\n" if end == FINGERPRINT else FINISHED) + DONE
    for reads in (chunks, [*filter(None, pieces), wire[at:]], [wire]):
        with closing(Journal.create("test", 1 << 16, 8)) as journal, way() as one:
            if counted:
                one.context.ledger = Recorder(journal)
            body = unchunked(one.streamed([STREAM_HEAD, *filter(None, reads), b"0\r\n\r\n"], include_usage=False))
            record = one.context.records.pop()
        assert body == expected
        assert record.usage is not None and (record.usage.prompt, record.usage.completion) == (PROMPT, total)
        assert record.gaps is not None and record.gaps.events == len(choice_events) + 2


@settings(max_examples=examples(40), deadline=None)
@given(
    missing=st.sets(st.integers(0, 9), max_size=4),
    endings=st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n"]), min_size=10, max_size=10),
    cuts=st.lists(st.integers(1, 300), max_size=6),
)
def test_the_charge_of_a_truncated_stream_does_not_depend_on_its_reads(missing: set[int], endings: list[bytes], cuts: list[int]) -> None:
    asyncio.run(compare_charges(missing, endings, cuts))


async def compare_charges(missing: set[int], endings: Sequence[bytes], cuts: Sequence[int]) -> None:
    """Some events have no counts, and lines end in different ways."""
    events = [EVENT % b"a" if n in missing else with_usage(EVENT % b"a", n) for n in range(10)]
    wire = b"".join(frame(event[:-2] + end) for event, end in zip(events, endings, strict=True))
    usages, at, pieces = [], 0, list[bytes]()
    for size in cuts:
        pieces.append(wire[at : at + size])
        at += size
    for reads in ([wire], [*pieces, wire[at:]], [wire[n : n + 7] for n in range(0, len(wire), 7)]):
        with closing(Journal.create("test", 1 << 16, 8)) as journal, way() as one:
            one.context.ledger = Recorder(journal)
            one.streamed([STREAM_HEAD, *filter(None, reads)], include_usage=False)
            one.server.connection_lost(None)
            one.write_batch.flush()
            record = one.context.records.pop()
            usages.append((record.usage, record.estimated_by))
    assert len(set(usages)) == 1, usages


def test_blank_lines_behind_an_event_that_waits_stay_behind_it() -> None:
    sent = [EVENT % b"a", FINISHED + b"\n\n", b": a comment\n\n", DONE]
    with way() as one:
        assert unchunked(one.streamed([STREAM_HEAD, *map(frame, sent), b"0\r\n\r\n"], False)) == b"".join(sent)
    with way() as one:
        assert unchunked(one.streamed([STREAM_HEAD, *map(frame, [*sent[:2], COUNT, DONE]), b"0\r\n\r\n"], False)) == b"".join(
            [*sent[:2], DONE]
        )


# The reads that take the fast path

DELTA = b'data: {"delta":{"text":"%b"}}\n\n'
SHORTEST, LONGEST = 64, 2040
"""Bytes of the events that take it: with its frame, a chunk has less than 2 KiB."""


def delta(size: int) -> bytes:
    """Return an event with this number of bytes."""
    return DELTA % (b"a" * (size - len(DELTA) + 2))


class GeneralPath(Connection):
    """A connection that stores what is passed to the general path."""

    def __init__(self) -> None:
        super().__init__("tiny", lambda _: None, WriteBatch())
        self.passed_on: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.passed_on.append(data)


class Reader:
    """The fast path of one stream, with what it writes and what it passes to the general path. It has no connections."""

    def __init__(self, running: RunningUsage | None = None, dialect: Dialect = Dialect.MESSAGES) -> None:
        nothing, general_path = cast("Any", None), GeneralPath()
        self.running, self.held, self.passed_on = running, bytearray(), general_path.passed_on
        self.sent: list[bytes] = []
        self.gaps, self.chunks, self.learner = ReadGaps(monotonic()), ChunkedDecoder(1000), TemplateLearner(dialect)
        self.response = UpstreamResponse(nothing, nothing, nothing)
        self.request = ClientRequest(nothing, nothing, "req_1", nothing, nothing, keep_alive=True)
        fast_path = FastPath(self.response, self.request, self.gaps, self.held, self.sent.append, self.learner, running)
        self.read = fast_path.reader(general_path, self.chunks)

    def learn(self, event: bytes, shown: bytes | None = None) -> None:
        self.learner.learn(event, orjson.loads(data_of(event)), event if shown is None else shown)


@each_row(
    ("data", "is_fast"),
    [
        (frame(delta(SHORTEST)), True),
        (frame(delta(SHORTEST - 1)), False),
        (frame(delta(LONGEST)), True),
        (frame(delta(LONGEST + 1)), False),
        (frame(delta(5000)), False),
        (frame(delta(300)), True),
        (frame(DELTA % (b'\\"' * 30)), True),
        (frame(DELTA % (b"\\u0001" * 30)), False),
        (frame(delta(300)).replace(b"12c", b"12C"), False),
        (frame(delta(300)).replace(b"12c", b"12d"), False),
        (frame(delta(300)) + b"0\r\n\r\n", False),
        (frame(delta(300))[:-1], False),
        (frame(delta(300)).replace(b"data", b"dada"), False),
        (frame(delta(300)).replace(b"}}", b"},"), False),
        (b"0\r\n\r\n", False),
        (b"\n", False),
    ],
)
def test_which_reads_take_the_fast_path(data: bytes, is_fast: bool) -> None:
    """They are sent as they are, and counted. Every other read is not changed either."""
    one = Reader()
    one.learn(DELTA % b"a")
    one.read(data)
    assert (one.sent, one.passed_on) == (([data], []) if is_fast else ([], [data]))
    assert (one.sent or one.passed_on)[0] is data
    assert one.request.bytes_out == (int(data.partition(b"\r\n")[0], 16) if is_fast else 0)
    assert sum(one.gaps.counts) == is_fast and (one.response.last_byte_at > 0) is is_fast
    if is_fast:
        assert one.gaps.last == one.response.last_byte_at
        assert one.gaps.counts.index(1) <= bisect_left(CHUNK_GAPS, one.gaps.total)
        one.read(data)
        assert one.request.bytes_out == 2 * int(data.partition(b"\r\n")[0], 16) and sum(one.gaps.counts) == 2


def test_a_read_takes_the_fast_path_only_between_whole_events() -> None:
    data = frame(delta(300))
    untaught, holding, inside, numbered = Reader(), Reader(), Reader(), Reader()
    for one in (holding, inside):
        one.learn(DELTA % b"a")
    holding.held += b"d"
    inside.chunks.feed(b"5\r\n", 0, inside.passed_on.append)
    for one in (untaught, holding, inside):
        one.read(data)
        assert (one.sent, one.passed_on, one.request.bytes_out) == ([], [data], 0)
    numbered.learn(DELTA[:-3] % b"a" + b',"n":1}\n\n')
    for number, is_fast in ((b"0", True), (b"1234", True), (b"01", False), (b'"1"', False), (b"1 ", False)):
        numbered.read(frame(delta(300)[:-3] + b',"n":%b}\n\n' % number))
        assert len(numbered.sent) == is_fast and len(numbered.passed_on) is not is_fast
        numbered.sent.clear()
        numbered.passed_on.clear()


def test_the_running_usage_is_left_out_on_the_fast_path() -> None:
    one = Reader(RunningUsage(1, 1, hidden=True), Dialect.CHAT)
    shown, counted = EVENT % b"a", with_usage(EVENT % b"a", 3)
    one.read(frame(counted))
    one.learn(counted, shown)
    one.read(frame(with_usage(EVENT % b"bcd", 70)))
    assert one.passed_on == [frame(counted)] and one.sent == [frame(EVENT % b"bcd")]
    assert one.request.bytes_out == len(EVENT % b"bcd")
    assert one.running is not None
    assert one.running.usage == Usage(PROMPT, 70, 0, 0)
    one.learn(shown)
    one.read(frame(EVENT % b"ef"))
    assert one.sent[1:] == [frame(EVENT % b"ef")], "nothing is to be left out"


@settings(max_examples=examples(50), deadline=None)
@given(server=SERVERS, dice=DICE)
def test_both_paths_record_the_same_texts(server: Server, dice: random.Random) -> None:
    """A chunk that has the template of an earlier event is recorded from its bytes."""
    general, record = (SentText(server.dialect, lambda _: True) for _ in range(2))
    learner, sent = TemplateLearner(server.dialect), list[bytes]()
    recorder = TextRecorder(record, learner, sent.append)
    for event, _ in server.events(dice):
        document = orjson.loads(data_of(event)) if event != DONE else {"choices": []}
        general.take(event, document)
        if describes(learner.template, event):
            recorder.write(frame(event))
            assert sent.pop() == frame(event)
            continue
        record.take(event, document)
        name = record.text_of(document)
        if is_ordinary(document, server.dialect) and name is not None:
            learner.learn(event, document, event, name)
    assert (record.texts, record.marks, record.counts) == (general.texts, general.marks, general.counts)
    assert server.dialect is not Dialect.RESPONSES or record.sequence == general.sequence
