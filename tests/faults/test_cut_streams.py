"""Truncated streams: a client never receives a partial event, and every stream has a valid end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest

from tests.faults.chaos import End, Weather, chaos
from tests.faults.invariants import unharmed
from tests.support.running import model
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DONE, HELLO, ROLE, STOP, STREAM_HEAD, Reply, chat, request, request_once
from upstream.http.deadlines import Timeouts

EVENTS = (ROLE, HELLO, STOP)
WIRE = STREAM_HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS)
"""The bytes of a stream that the server never finishes."""


async def _three_events(talk: Conversation) -> None:
    await talk.write(WIRE)
    await talk.closed_by_peer()


@pytest.mark.row(2)
@pytest.mark.parametrize("end", [End.CLOSE, End.RESET, End.HALF_CLOSE])
async def test_a_cut_at_any_byte_leaves_complete_events(end: End, measured: Callable[[str], None]) -> None:
    cuts = range(1, len(WIRE) + 1)
    async with (
        scripted(_three_events) as server,
        chaos(server.port, lambda number: Weather(cut_at=cuts[number], end=end)) as network,
        unharmed([model(network.port)]) as served,
    ):
        for at in cuts:
            reply = await request_once(served.port, request(chat(stream=True)))
            _check(reply, _events_before(at))
        assert network.accepted == len(cuts)
    measured(f"{len(cuts)} positions, {end.name.lower()}: no partial event seen")


def _events_before(at: int) -> int:
    """Count the complete events in the first ``at`` bytes of ``WIRE``."""
    event_ends, position = [], len(STREAM_HEAD)
    for event in EVENTS:
        position += len(b"%x\r\n" % len(event)) + len(event)
        event_ends.append(position)
        position += 2
    return sum(end <= at for end in event_ends)


def _check(reply: Reply, whole: int) -> None:
    """Check the error: a 502 before the first event, since no status was sent yet; afterwards an error event."""
    if not whole:
        assert reply.status == 502 and reply.error["code"] == "upstream_disconnected"
        return
    shown = b"".join(EVENTS[:whole])
    assert reply.status == 200 and reply.whole and reply.body.startswith(shown) and reply.body.endswith(DONE)
    (error,) = reply.body.removeprefix(shown).removesuffix(DONE).split(b"\n\n")[:-1]
    assert orjson.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_disconnected"


@pytest.mark.row(2)
async def test_a_silent_network_hits_the_idle_timeout(measured: Callable[[str], None]) -> None:
    async with (
        scripted(_three_events) as server,
        chaos(server.port, Weather(cut_at=len(STREAM_HEAD) + 5, end=End.BLACK_HOLE)) as network,
        unharmed([model(network.port, timeouts=Timeouts(first_byte=0.5, idle=0.5))]) as served,
    ):
        reply = await asyncio.wait_for(request_once(served.port, request(chat(stream=True))), 10)
        assert reply.status == 504 and reply.error["code"] == "upstream_timeout"
    measured("no packets: 504")
