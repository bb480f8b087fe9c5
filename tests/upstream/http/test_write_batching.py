"""Writes that are buffered until the end of the event-loop iteration: none is lost, reordered or retained."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.http.write_batching import BatchingTransport, LeadingTransport, WriteBatch


class Wire(asyncio.Transport):
    """A transport that notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.written.append("close")

    def abort(self) -> None:
        self.written.append("abort")

    def get_write_buffer_size(self) -> int:
        return 1000


def busy() -> WriteBatch:
    """Return the write batch of a busy loop."""
    batch = WriteBatch()
    batch.batching = True
    return batch


async def test_a_turns_writes_are_one() -> None:
    batch, wires = busy(), [Wire(), Wire()]
    one, other = (BatchingTransport(wire, batch) for wire in wires)
    one.write(b"a")
    other.writelines([b"x", b"y"])
    one.write(b"b")
    assert [wire.written for wire in wires] == [[], []] and one.get_write_buffer_size() == 1002
    await asyncio.sleep(0)
    assert [wire.written for wire in wires] == [[b"ab"], [b"xy"]] and one.get_write_buffer_size() == 1000
    one.write(b"c")
    await asyncio.sleep(0)
    assert wires[0].written == [b"ab", b"c"], "the next turn is another one"


async def test_an_awaited_write_does_not_wait_for_those_of_others() -> None:
    batch, wires = busy(), [Wire() for _ in range(2)]
    one, other = (BatchingTransport(wire, batch) for wire in wires)
    one.write(b"a")
    other.write(b"x")
    other.write_at_once(b"y")
    assert [wire.written for wire in wires] == [[], [b"xy"]], "its own bytes stay in order"
    other.write_at_once(b"z")
    other.write(b".")
    await asyncio.sleep(0)
    assert [wire.written for wire in wires] == [[b"a"], [b"xy", b"z", b"."]]


async def test_many_transports_do_not_wait_for_the_end_of_the_iteration() -> None:
    batch, wires = busy(), [Wire() for _ in range(70)]
    for wire in wires:
        BatchingTransport(wire, batch).write(b"a")
    assert [bool(wire.written) for wire in wires] == [True] * 64 + [False] * 6
    await asyncio.sleep(0)
    assert [wire.written for wire in wires] == [[b"a"]] * 70


async def test_a_loop_that_has_little_to_send_sends_it_at_once() -> None:
    batch, wires = WriteBatch(), [Wire() for _ in range(3)]
    transports = [BatchingTransport(wire, batch) for wire in wires]
    for number in range(100):
        transports[number % 3].write(b"%d" % number)
        assert wires[number % 3].written[-1] == b"%d" % number
        await asyncio.sleep(0)
    assert not batch.batching


async def test_a_loop_gathers_when_it_is_busy_and_no_longer() -> None:
    batch, wires = WriteBatch(), [Wire() for _ in range(3)]
    transports = [BatchingTransport(wire, batch) for wire in wires]
    for _ in range(10):
        for batched in transports:
            batched.write(b"x")
        await asyncio.sleep(0)
    was_busy = batch.batching
    for _ in range(10):
        transports[0].write(b"x")
        await asyncio.sleep(0)
    assert was_busy and not batch.batching
    assert [len(b"".join(wire.written)) for wire in wires] == [20, 10, 10]


async def test_what_is_large_is_not_copied() -> None:
    batch, wire = busy(), Wire()
    batched = BatchingTransport(wire, batch)
    batched.write(b"head")
    batched.write(bytes(1 << 20))
    assert [len(each) for each in wire.written] == [4, 1 << 20]
    batched.write(b"tail")
    batch.flush()
    assert wire.written[2:] == [b"tail"]


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_close_and_abort_send_the_buffered_bytes_first(how: str) -> None:
    batch, wire = busy(), Wire()
    batched = BatchingTransport(wire, batch)
    batched.write(b"last words")
    getattr(batched, how)()
    batch.flush()
    assert wire.written == [b"last words", how]


async def test_a_lost_connection_takes_what_was_meant_for_it_and_the_others_get_theirs() -> None:
    batch, closed_wire, open_wire = busy(), Wire(), Wire()
    lost, batched = BatchingTransport(closed_wire, batch), BatchingTransport(open_wire, batch)
    lost.write(b"a")
    batched.write(b"b")
    lost.mark_closed()
    lost.write(b"c")
    batch.flush()
    batch.flush()
    assert (closed_wire.written, open_wire.written) == ([], [b"b"])


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=4) | st.just(b"z" * 70_000) | st.none()), max_size=30))
def test_every_byte_in_its_order(steps: list[tuple[int, bytes | None]]) -> None:
    """``None``: the batch is flushed, or only transport 0."""

    async def written() -> list[bytes]:
        batch, wires = busy(), [Wire() for _ in range(3)]
        transports = [BatchingTransport(wire, batch) for wire in wires]
        for number, data in steps:
            if data is not None:
                transports[number].write(data)
            elif number:
                batch.flush()
            else:
                transports[0].flush()
        await asyncio.sleep(0)
        return [b"".join(wire.written) for wire in wires]

    assert asyncio.run(written()) == [b"".join(data for each, data in steps if each == number and data) for number in range(3)]


async def test_real_sockets_get_everything_before_the_end() -> None:
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    batched = BatchingTransport(transport, batch := busy())
    batched.write(b"all ")
    batched.write(b"of it")
    batched.close()
    batch.flush()
    reader, writer = await asyncio.open_connection(sock=theirs)
    assert await reader.read() == b"all of it"
    writer.close()
    await writer.wait_closed()


class Noting(Wire):
    """A transport that notes its writes in a list that several share."""

    def __init__(self, name: str, notes: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self._name, self._notes = name, notes

    def write(self, data: Any) -> None:
        self._notes.append((self._name, bytes(data)))


async def test_the_bytes_of_a_leading_transport_are_sent_together_and_first() -> None:
    batch, notes = busy(), list[tuple[str, bytes]]()
    client, store = BatchingTransport(Noting("client", notes), batch), LeadingTransport(Noting("store", notes), batch)
    client.write(b"part of a response")
    for _ in range(2):
        store.write(b"settle")
    client.write(b", its end")
    await asyncio.sleep(0)
    assert notes == [("store", b"settlesettle"), ("client", b"part of a response, its end")]


@pytest.mark.parametrize("end", ["close", "abort", "a large write"])
async def test_a_leading_transport_is_first_if_another_cannot_wait(end: str) -> None:
    batch, notes = busy(), list[tuple[str, bytes]]()
    client, store = BatchingTransport(Noting("client", notes), batch), LeadingTransport(Noting("store", notes), batch)
    client.write(b"response")
    store.write(b"settle")
    if end == "a large write":
        client.write(bytes(1 << 20))
    else:
        getattr(client, end)()
    assert [name for name, _ in notes][:2] == ["store", "client"]


async def test_a_leading_transport_writes_to_its_socket_at_once() -> None:
    """The event loop may send what other transports got before. The event loop sends the bytes that the socket does not take."""
    own, other = socket.socketpair()
    with own, other:
        own.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, sock=own)
        leading = LeadingTransport(transport, WriteBatch())
        leading.write(b"settle")
        assert other.recv(100, socket.MSG_DONTWAIT) == b"settle"
        data = bytes(range(256)) * 20_000
        leading.write(data)
        leading.write(b"end")
        received = b""
        while not received.endswith(b"end"):
            received += await asyncio.to_thread(other.recv, 1 << 20)
        assert received == data + b"end"
        other.close()
        for _ in range(3):
            leading.write(b"to nobody")
            await asyncio.sleep(0)
        transport.close()


async def test_a_leading_transport_counts_among_many() -> None:
    batch, notes = busy(), list[tuple[str, bytes]]()
    clients = [BatchingTransport(Noting("client", notes), batch) for _ in range(32)]
    for client in clients[:31]:
        client.write(b"a")
    LeadingTransport(Noting("store", notes), batch).write(b"settle")
    clients[31].write(b"a")
    assert [name for name, _ in notes] == ["store"] + ["client"] * 32


async def test_a_leading_transport_of_a_quiet_loop_does_not_wait() -> None:
    notes: list[tuple[str, bytes]] = []
    LeadingTransport(Noting("store", notes), WriteBatch()).write(b"settle")
    assert notes == [("store", b"settle")]
