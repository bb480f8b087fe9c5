"""What goes through is what was sent, wherever network and server cut it: tens of thousands of streams, without sockets."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gateway.access_log import access_log
from gateway.app import Relay
from gateway.link import Health
from gateway.metrics import RelayMetrics
from gateway.state import State
from tests.faults.conftest import FULL
from tests.gateway.test_cost import Wire
from tests.gateway.test_fidelity import chunked, cut
from tests.support.running import board, key, model
from tests.support.wire import COUNT, DONE, HELLO, ROLE, STOP, STREAM_HEAD, chat, request
from upstream.connection import Connection
from upstream.pool import fleet
from upstream.server import Condition
from upstream.sse import EventTooLongError, Splitter, split

STREAMS = 100_000 if FULL else 2_000
TEXTS = 100_000 if FULL else 5_000
LONG = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
MIDDLE = (HELLO, STOP, LONG % b"x", LONG % (b"y" * 300), LONG % (b"error" * 9), LONG % (b"z" * 3000), b": a comment\n\n",
          b"event: a\r\ndata: b\r\n\r\n", b"data: a\ndata: b\n\n")  # fmt: skip


_ENDS = b"\n\n", b"\r\n\r\n", b"\r\n\r"
"""How events end; behind a CR the LF may come with the next read, and belongs to no event."""


class Way:
    """A client's connection and a server's, with stand-ins for their transports."""

    def __init__(self, relay: Relay) -> None:
        self.turn, uvicorn = relay.turn, relay.server()
        uvicorn.config.load()
        (server,) = relay.fleet
        self.client, self.client_wire = relay.protocol()(uvicorn.config, uvicorn.server_state, {}), Wire()
        self.server, self.server_wire = Connection(server.spec.name, server.park, relay.turn), Wire()
        self.client.connection_made(self.client_wire)
        self.server.connection_made(self.server_wire)
        server.park(self.server)

    def streamed(self, pieces: list[bytes], asks: bool) -> bytes:
        """What the client gets of an answer that comes in these reads."""
        options = {"stream_options": {"include_usage": True}} if asks else {}
        self.client.data_received(request(chat(stream=True, **options)))
        self.turn.end()
        assert self.server_wire.take()
        for piece in pieces:
            self.server.data_received(piece)
            self.turn.end()
        return self.client_wire.take()

    def end(self) -> None:
        self.client.connection_lost(None)
        self.server.connection_lost(None)


@contextmanager
def way() -> Iterator[Way]:
    nowhere, served = os.open(os.devnull, os.O_WRONLY), model(1)
    with board() as counts, fleet() as servers, access_log(nowhere) as log:
        relay = Relay(State(1, (key(),), (served,)), fleet=servers, metrics=RelayMetrics(counts), log=log)
        relay.learn(Health({spec.name: Condition.UP for spec in served.servers}, {}))
        made = Way(relay)
        yield made
        made.end()
    os.close(nowhere)


def _unchunked(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding: chunked" in head
    body, at = list[bytes](), 0
    while True:
        end = rest.index(b"\r\n", at)
        size = int(rest[at:end], 16)
        if not size:
            assert rest[end:] == b"\r\n\r\n", "the answer is not whole"
            return b"".join(body)
        body.append(rest[end + 2 : end + 2 + size])
        assert body[-1].endswith(_ENDS) or body[-1] == b"\n", "half an event was passed on"
        at = end + size + 4


@pytest.mark.row(31)
@pytest.mark.timeout(1200)
async def test_streams_however_they_are_cut(measured: Callable[[str], None]) -> None:
    dice = random.Random(31)
    with way() as one:
        for _ in range(STREAMS):
            events = [ROLE, *dice.choices(MIDDLE, k=dice.randrange(12)), COUNT, DONE]
            body = b"".join(events)
            chunks = events if dice.random() < 0.5 else cut(body, [dice.randrange(len(body)) for _ in range(dice.randrange(12))])
            wire = STREAM_HEAD + chunked(chunks)
            framed = [STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n"]
            reads = framed if dice.random() < 0.5 else cut(wire, [dice.randrange(len(wire)) for _ in range(dice.randrange(30))])
            asks = dice.random() < 0.5
            wanted = b"".join(event for event in events if asks or event is not COUNT)
            assert _unchunked(one.streamed(reads, asks)) == wanted
    measured(f"{STREAMS:,} streams, cut at random by server and network: equal, and never half an event")


_BLANK = re.compile(rb"(?:\r\n|\n|\r)(?:\r\n|\n|\r)")


@pytest.mark.row(31)
@pytest.mark.timeout(600)
def test_any_bytes_through_the_splitter(measured: Callable[[str], None]) -> None:
    """Nothing is lost, changed or reordered, and what is held back holds no whole event; a bound is a bound."""
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
    measured(f"{TEXTS:,} texts of line ends through the splitter: nothing lost, 0 crashes")
