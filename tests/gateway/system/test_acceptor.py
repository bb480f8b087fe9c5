"""Workers that share a listening socket get even shares of its connections."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from gateway.system.acceptor import Acceptor, Seats
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import until

WORKERS = 2
MANY = 100
EVEN = 0.55
"""The largest share of the connections that one of two workers may have."""
MOST = 4 * MANY
"""The connections within which two workers become even, however long a worker gets no CPU time."""


@pytest.fixture
def seats() -> Iterator[Seats]:
    with closing(Seats.create(2)) as made:
        yield made


def test_a_worker_that_is_clearly_ahead_pauses(seats: Seats) -> None:
    other = Seats(seats.fd, 1)
    assert not seats.is_ahead(1000), "the other is not there yet"
    other.publish(0)
    assert [seats.is_ahead(count) for count in (0, 2, 3)] == [False, False, True]
    other.publish(160)
    assert [seats.is_ahead(count) for count in (100, 167, 168)] == [False, False, True]
    seats.vacate(1)
    assert not seats.is_ahead(1000), "it is gone"


async def test_no_connection_waits_for_a_worker_that_accepts_none(seats: Seats) -> None:
    Seats(seats.fd, 1).publish(0)  # the other worker accepts nothing
    taken: list[socket.socket] = []

    async def begin(connection: socket.socket) -> None:
        taken.append(connection)

    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Acceptor(listener, begin, seats)), ExitStack() as clients:
        for _ in range(20):
            clients.enter_context(closing(socket.create_connection(listener.getsockname())))
        await until(lambda: len(taken) == 20)
    for connection in taken:
        connection.close()


async def test_a_connection_that_fails_to_start_is_closed_and_does_not_count(seats: Seats) -> None:
    async def begin(_: socket.socket) -> None:
        raise ConnectionResetError

    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Acceptor(listener, begin, seats)):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        assert published(seats) == 0
        writer.close()


async def test_an_acceptor_without_descriptors_can_be_closed(seats: Seats, caplog: pytest.LogCaptureFixture) -> None:
    """It has planned to accept again in a moment."""
    loop, errors = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context))

    async def begin(connection: socket.socket) -> None:
        raise AssertionError(connection)

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor, (soft, hard) = Acceptor(listener, begin, seats), resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(acceptor), closing(socket.create_connection(listener.getsockname())) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # open descriptors stay open, and no more can be opened
        try:
            await until(lambda: "connections cannot be accepted" in caplog.text)
            tried_again = loop.time() + 0.3
            await until(lambda: loop.time() > tried_again)
            assert caplog.text.count("connections cannot be accepted") == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        acceptor.close()
        acceptor.close()
        client.setblocking(False)
        with suppress(ConnectionResetError):
            assert await loop.sock_recv(client, 1) == b""
        later = loop.time() + 0.2  # the pause is half as long
        await until(lambda: loop.time() > later)
        assert errors == [] and published(seats) == 0


def published(seats: Seats) -> int:
    """Read the number of connections of the first worker."""
    return int.from_bytes(os.pread(seats.fd, 8, 0), "little")


class TwoAcceptors:
    """Two acceptors of one socket in one event loop. They act as two workers, and a stalled machine delays both."""

    def __init__(self, seats: Seats, stack: ExitStack) -> None:
        self.held: list[list[socket.socket]] = [[], []]
        self._seats = (seats, Seats(seats.fd, 1))
        self._stack = stack
        self._acceptors: dict[int, Acceptor] = {}
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=MANY))

    def begin(self, number: int) -> None:
        """Start the acceptor with this number."""
        mine = self.held[number]

        async def begin(connection: socket.socket) -> None:
            mine.append(self._stack.enter_context(connection))

        self._acceptors[number] = self._stack.enter_context(closing(Acceptor(self._listener.dup(), begin, self._seats[number])))

    def close(self, number: int) -> None:
        """Close all connections of the acceptor with this number."""
        while self.held[number]:
            self.held[number].pop().close()
            self._acceptors[number].connection_closed()

    async def connect(self, count: int) -> None:
        """Open this many connections at once, and wait until they are accepted."""
        before = sum(map(len, self.held))
        for _ in range(count):
            self._stack.enter_context(socket.create_connection(self._listener.getsockname()))
        await until(lambda: sum(map(len, self.held)) == before + count)


async def test_connections_are_shared(seats: Seats) -> None:
    with ExitStack() as stack:
        both = TwoAcceptors(seats, stack)
        both.begin(0)
        both.begin(1)
        await both.connect(MANY)
        assert max(map(len, both.held)) <= EVEN * MANY


async def test_a_late_worker_accepts_connections_until_both_are_even(seats: Seats) -> None:
    with ExitStack() as stack:
        both = TwoAcceptors(seats, stack)
        both.begin(0)
        await both.connect(MANY // 2)
        both.begin(1)
        await both.connect(MANY // 2)
        assert max(map(len, both.held)) <= EVEN * MANY


async def test_64_connections_at_once_are_shared_evenly(seats: Seats) -> None:
    with ExitStack() as stack:
        both = TwoAcceptors(seats, stack)
        both.begin(0)
        both.begin(1)
        for _ in range(5):
            await both.connect(64)
            assert max(map(len, both.held)) <= EVEN * 64
            both.close(0)
            both.close(1)


async def test_a_worker_whose_connections_close_gets_the_next_connections(seats: Seats) -> None:
    with ExitStack() as stack:
        both = TwoAcceptors(seats, stack)
        both.begin(0)
        both.begin(1)
        await both.connect(64)
        both.close(0)
        await both.connect(32)
        assert max(map(len, both.held)) <= EVEN * 64


async def test_a_connection_counts_once_until_it_closes(seats: Seats) -> None:
    """An old number, or a connection that counts twice for a moment, lets another worker accept too many."""

    proceed = asyncio.Event()

    async def begin(connection: socket.socket) -> None:
        stack.enter_context(connection)
        await proceed.wait()

    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Acceptor(listener, begin, seats)) as acceptor, ExitStack() as stack:
        for number in (1, 2):
            stack.enter_context(closing(socket.create_connection(listener.getsockname())))
            await until(lambda number=number: published(seats) == number)
        proceed.set()
        for _ in range(3):
            await asyncio.sleep(0)
            assert published(seats) == 2
        acceptor.connection_closed()
        assert published(seats) == 1


def _clients_by_worker(running: Gateway) -> list[int]:
    """Count the clients of each worker."""
    counts = []
    for pid in running.workers().values():
        sockets = psutil.Process(pid).net_connections("tcp")
        counts.append(sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == running.data for each in sockets))
    return counts


def _all_workers_up(running: Gateway) -> bool:
    return all(each["up"] for each in running.get("/status").json()["workers"])


def _connect_until_even(running: Gateway, clients: ExitStack, count: int) -> None:
    """Open this many connections, and then more until no worker has clearly more than the other.

    The other worker does not wait for a worker that gets no CPU time for some milliseconds, and accepts its share.
    The workers are even again once both run.
    """
    there = sum(_clients_by_worker(running))

    def connect(more: int) -> None:
        nonlocal there
        for _ in range(more):
            clients.enter_context(socket.create_connection(("127.0.0.1", running.data)))
        there += more
        wait_for(lambda: sum(_clients_by_worker(running)) == there, why=lambda: str(_clients_by_worker(running)))

    connect(count)
    while max(_clients_by_worker(running)) > EVEN * there:
        assert there < MOST, _clients_by_worker(running)
        connect(5)


def test_a_restarted_worker_gets_its_share_of_connections(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), workers=WORKERS, headers_timeout="10m")) as running, ExitStack() as clients:
        wait_for(lambda: _all_workers_up(running))
        _connect_until_even(running, clients, MANY)
        os.kill(running.workers()[0], signal.SIGKILL)
        wait_for(lambda: running.get("/status").json()["workers"][0]["restarts"] and _all_workers_up(running))
        _connect_until_even(running, clients, sum(_clients_by_worker(running)))
        assert running.request().status_code == 200
