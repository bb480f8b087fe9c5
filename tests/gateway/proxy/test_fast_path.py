"""The fast path of a chunk and the general path account for a stream in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.usage import Usage
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import decode
from gateway.telemetry.request_record import RequestRecord
from tests.support.examples import examples
from tests.support.way import Way, unchunked, way
from tests.support.wire import COUNT, DONE, ROLE, STREAM_HEAD

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
            assert decode(open_row).generated == (2 * latest, True), "what the journal would say of a worker that died"
            records.append(record)
    fast, general = records
    assert (fast.response_bytes, fast.usage) == (general.response_bytes, general.usage)
    assert fast.gaps is not None and general.gaps is not None and fast.gaps.events == general.gaps.events == len(events)
