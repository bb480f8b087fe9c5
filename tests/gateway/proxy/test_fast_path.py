"""The fast path of a chunk and the general path account for a stream in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.telemetry.request_record import RequestRecord
from tests.support.examples import examples
from tests.support.way import Way, unchunked, way
from tests.support.wire import COUNT, DONE, ROLE, STREAM_HEAD

EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
EVENTS = (EVENT % b"a", EVENT % (b"b" * 300), EVENT % (b"an error" * 3), EVENT % (b"c" * 3000), b": a comment\n\n", COUNT)
"""Ordinary events, one with a mark, one that is too long for the fast path, a comment, and a usage event."""


def frame(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def relayed(one: Way, events: Sequence[bytes], *, cut: bool, asks: bool) -> tuple[bytes, RequestRecord]:
    """Relay a stream with one event in each chunk. ``cut``: each chunk arrives in two reads, so that no chunk takes the fast path."""
    reads = [STREAM_HEAD]
    for event in events:
        chunk = frame(event)
        reads += [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]] if cut else [chunk]
    body = unchunked(one.streamed([*reads, b"0\r\n\r\n"], asks))
    return body, one.context.records.pop()


async def compare(events: Sequence[bytes], asks: bool) -> None:
    with way() as one:
        fast_body, fast = relayed(one, events, cut=False, asks=asks)
        general_body, general = relayed(one, events, cut=True, asks=asks)
    assert fast_body == general_body
    assert (fast.response_bytes, fast.usage, fast.incomplete) == (general.response_bytes, general.usage, None)
    assert fast.gaps is not None and general.gaps is not None
    assert fast.gaps.events == general.gaps.events == len(events)
    assert sum(fast.gaps.counts) == sum(general.gaps.counts) == len(events) - 1, "a gap for each read after the first"
    assert fast.gaps.are_counted == general.gaps.are_counted


@settings(max_examples=examples(50), deadline=None)
@given(middle=st.lists(st.sampled_from(EVENTS), max_size=12), asks=st.booleans())
def test_both_paths_account_for_a_stream_alike(middle: list[bytes], asks: bool) -> None:
    asyncio.run(compare((ROLE, *middle, COUNT, DONE), asks))
