"""Messages between control and a worker arrive unchanged, or the link is closed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.snapshot.link import (
    MAX_FRAME,
    ApplySnapshot,
    Drain,
    Health,
    HealthApplied,
    Link,
    LinkBrokenError,
    Message,
    ModelRequested,
    SnapshotApplied,
    encode,
)
from gateway.snapshot.snapshot import Key, Model, Queue, Snapshot
from upstream.balancing.server import Condition, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import Timeouts

SNAPSHOT = Snapshot(
    7,
    (Key("a", digests=(b"\x00" * 32, b"\xff" * 32), models=("x/*",), expires=1.5, digest_expiries={b"\xff" * 32: 2.5}, revoked=True),
     Key("b", anonymous=True)),
    (
        Model(
            "m",
            (ServerSpec("m#0", Address("::1", 8000, tls=True, prefix="/p"), "served", api_key="k", weight=2.0),
             ServerSpec("m#1", Address(uds="/run/x.sock"), "m")),
            aliases=("q",), mounts=("/i/1",), balance="round_robin", timeouts=Timeouts(1, 2, 3, 4), queue=Queue(4, 0.5), keepalive=7.0,
            defaults={"temperature": 0.7, "stop": ["a"], "nested": {"x": None}}, overrides={"seed": 1}, created=5,
        ),
    ),
    body_limit=99,
    cors_origins=("https://a",),
)  # fmt: skip
MESSAGES: list[Message] = [
    ApplySnapshot(SNAPSHOT, Health({"a": Condition.UP}, {"m": 3})),
    Health({"m#0": Condition.UP, "m#1": Condition.LOADING}, {"m": 2048}),
    Health({}, {}, {"m": 12.5}, 3),
    Drain(1.5),
    HealthApplied(3),
    ModelRequested("m", 0.25),
    ModelRequested("m", None),
    SnapshotApplied(7),
    ApplySnapshot(Snapshot(0, (), ()), Health({}, {})),
]


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Link, asyncio.StreamWriter]]:
    """Yield a link and a writer for the other end of its socket."""
    ours, theirs = socket.socketpair()
    link = Link(*await asyncio.open_connection(sock=ours))
    _, writer = await asyncio.open_connection(sock=theirs)
    try:
        yield link, writer
    finally:
        link.close()
        writer.close()


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
async def test_messages_arrive_as_they_were_sent(size: int) -> None:
    wire = b"".join(map(encode, MESSAGES))

    async def send() -> None:
        for at in range(0, len(wire), size):
            writer.write(wire[at : at + size])
            await writer.drain()
        writer.close()

    async with pair() as (link, writer):
        sending = asyncio.create_task(send())
        assert [message async for message in link.messages()] == MESSAGES
        await sending


async def test_messages_in_both_directions() -> None:
    ours, theirs = socket.socketpair()
    one, two = Link(*await asyncio.open_connection(sock=ours)), Link(*await asyncio.open_connection(sock=theirs))
    for message in MESSAGES:
        one.send(message)
    received = two.messages()
    assert [await anext(received) for _ in MESSAGES] == MESSAGES
    one.close()
    assert [message async for message in received] == []
    two.send(SnapshotApplied(1))
    two.send(SnapshotApplied(2))
    two.close()
    two.send(SnapshotApplied(3))
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", [b"", b"\x05", b"\x05\x00\x00\x00", b"\x05\x00\x00\x00abc"])
async def test_a_partial_frame_ends_the_messages(end: bytes) -> None:
    async with pair() as (link, writer):
        writer.write(encode(SnapshotApplied(1)) + end)
        writer.close()
        assert [message async for message in link.messages()] == [SnapshotApplied(1)]


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack("<I", MAX_FRAME + 1), id="too long"),
        pytest.param(struct.pack("<I", 0), id="empty"),
        pytest.param(struct.pack("<I", 4) + b"\xff\xff\xff\xff", id="no MessagePack"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("<I", 12) + b"\x81\xa4type\xa5Other", id="another kind"),
    ],
)
async def test_an_invalid_frame_breaks_the_link(frame: bytes) -> None:
    async with pair() as (link, writer):
        writer.write(encode(SnapshotApplied(1)) + frame)
        received = link.messages()
        assert await anext(received) == SnapshotApplied(1)
        with pytest.raises(LinkBrokenError):
            await anext(received)


async def test_a_link_whose_peer_does_not_read_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(*await asyncio.open_connection(sock=ours), max_unread=1 << 20)
        large = Health({f"server {number}": Condition.UP for number in range(10_000)}, {})
        sent = 0
        while not link.ended and sent < 1000:
            link.send(large)
            sent += 1
            await asyncio.sleep(0)
        assert 1 << 20 < sent * len(encode(large)) < 1 << 23, "what waits has a bound, and a message may be longer than a socket's buffer"
        assert [message async for message in link.messages()] == []
        link.close()
