"""A stream is forwarded unchanged, wherever network and server cut it. Tens of thousands of streams run without sockets."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from tests.faults.conftest import FULL
from tests.faults.invariants import nothing_left
from tests.gateway.proxy.test_response_bytes import chunked, cut
from tests.support.way import unchunked, way
from tests.support.wire import COUNT, DONE, HELLO, ROLE, STOP, STREAM_HEAD
from upstream.http.sse import EventTooLongError, Splitter, split

STREAMS = 100_000 if FULL else 2_000
TEXTS = 100_000 if FULL else 5_000
LONG = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
MIDDLE = (HELLO, STOP, LONG % b"x", LONG % (b"y" * 300), LONG % (b"error" * 9), LONG % (b"z" * 3000), b": a comment\n\n",
          b"event: a\r\ndata: b\r\n\r\n", b"data: a\ndata: b\n\n")  # fmt: skip


@pytest.mark.row(31)
@pytest.mark.timeout(1200)
async def test_streams_cut_at_random_are_unchanged(measured: Callable[[str], None]) -> None:
    dice = random.Random(31)
    async with nothing_left():
        with way() as one:
            for _ in range(STREAMS):
                events = [ROLE, *dice.choices(MIDDLE, k=dice.randrange(12)), COUNT, DONE]
                body = b"".join(events)
                chunks = events if dice.random() < 0.5 else cut(body, [dice.randrange(len(body)) for _ in range(dice.randrange(12))])
                wire = STREAM_HEAD + chunked(chunks)
                framed = [STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n"]
                reads = framed if dice.random() < 0.5 else cut(wire, [dice.randrange(len(wire)) for _ in range(dice.randrange(30))])
                wants_usage = dice.random() < 0.5
                wanted = b"".join(event for event in events if wants_usage or event is not COUNT)
                assert unchunked(one.streamed(reads, wants_usage)) == wanted
                assert one.context.records.pop().incomplete is None and not one.context.records, "each is recorded once"
            assert one.context.started == STREAMS
            assert one.context.inflight.in_flight == 0 and not one.context.deadlines
            assert [server.in_flight for server in one.worker.fleet] == [0]
    measured(f"{STREAMS:,} streams, cut at random by server and network: equal bytes, no partial event")


_BLANK = re.compile(rb"(?:\r\n|\n|\r)(?:\r\n|\n|\r)")


@pytest.mark.row(31)
def test_random_bytes_through_the_splitter(measured: Callable[[str], None]) -> None:
    """No byte is lost, changed or reordered. The held bytes contain no complete event, and their limit is enforced."""
    dice, limit = random.Random(311), 40
    for _ in range(TEXTS):
        text = b"".join(dice.choices([b"\r", b"\n", b"\r\n", b"data: x", b"\xff", b"a" * 7], k=dice.randrange(30)))
        splitter, given, fed = Splitter(limit), b"", b""
        try:
            for piece in cut(text, [dice.randrange(len(text) + 1) for _ in range(dice.randrange(6))]):
                fed += piece
                whole = splitter.feed(piece)
                given += whole
                assert b"".join(split(whole)) == whole
                assert len(splitter.held) <= limit
        except EventTooLongError:
            assert len(fed) - len(given) > limit
            continue
        held = splitter.take()
        assert given + held == text
        assert not _BLANK.search(held.replace(b"\r\n", b"\n")), "a whole event was held back"
    measured(f"{TEXTS:,} texts of line ends through the splitter: no byte lost, 0 crashes")
