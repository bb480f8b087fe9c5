"""Workers that share a listening socket share its connections, too."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from gateway.system.acceptor import Acceptor, Seats
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import until

WORKERS = 2
MANY = 100
MOST = 4 * MANY
"""Connections within which two workers are even, however long one of them gets no time."""


@pytest.fixture
def seats() -> Iterator[Seats]:
    with closing(Seats.create(2)) as made:
        yield made


def test_who_is_clearly_ahead_stands_back(seats: Seats) -> None:
    other = Seats(seats.fd, 1)
    assert not seats.is_ahead(1000), "the other is not there yet"
    other.publish(0)
    assert [seats.is_ahead(count) for count in (0, 2, 3)] == [False, False, True]
    other.publish(160)
    assert [seats.is_ahead(count) for count in (100, 172, 173)] == [False, False, True]
    seats.vacate(1)
    assert not seats.is_ahead(1000), "it is gone"


async def test_nobody_waits_for_a_worker_that_takes_none(seats: Seats) -> None:
    Seats(seats.fd, 1).publish(0)  # and that is all it does
    taken: list[socket.socket] = []

    async def begin(connection: socket.socket) -> None:
        taken.append(connection)

    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Acceptor(listener, begin, seats, lambda: len(taken))), ExitStack() as clients:
        for _ in range(20):
            clients.enter_context(closing(socket.create_connection(listener.getsockname())))
        await until(lambda: len(taken) == 20)
    for connection in taken:
        connection.close()


async def test_a_connection_that_cannot_be_begun_is_closed(seats: Seats) -> None:
    async def begin(_: socket.socket) -> None:
        raise ConnectionResetError

    listener = socket.create_server(("127.0.0.1", 0))
    with closing(Acceptor(listener, begin, seats, lambda: 0)):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()


class Sharing:
    """Two that take connections from one socket, as two workers do, in one loop: a machine that stands still holds up both."""

    def __init__(self, seats: Seats, stack: ExitStack) -> None:
        self.held: list[list[socket.socket]] = [[], []]
        self._seats = (seats, Seats(seats.fd, 1))
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=MANY))

    def begin(self, number: int) -> None:
        """This one takes connections from now on."""
        mine = self.held[number]

        async def begin(connection: socket.socket) -> None:
            mine.append(self._stack.enter_context(connection))

        acceptor = Acceptor(self._listener.dup(), begin, self._seats[number], lambda: len(mine))
        self._stack.enter_context(closing(acceptor))

    async def connect(self, count: int) -> None:
        """So many more, all at once; returns when they have been taken."""
        before = sum(map(len, self.held))
        for _ in range(count):
            self._stack.enter_context(socket.create_connection(self._listener.getsockname()))
        await until(lambda: sum(map(len, self.held)) == before + count)


async def test_connections_are_shared(seats: Seats) -> None:
    with ExitStack() as stack:
        both = Sharing(seats, stack)
        both.begin(0)
        both.begin(1)
        await both.connect(MANY)
        assert max(map(len, both.held)) <= 0.65 * MANY


async def test_one_that_came_later_takes_what_the_other_has_too_much(seats: Seats) -> None:
    with ExitStack() as stack:
        both = Sharing(seats, stack)
        both.begin(0)
        await both.connect(MANY // 2)
        both.begin(1)
        await both.connect(MANY // 2)
        assert max(map(len, both.held)) <= 0.65 * MANY


def _held(running: Gateway) -> list[int]:
    """How many clients each worker has."""
    found = []
    for pid in running.workers().values():
        links = psutil.Process(pid).net_connections("tcp")
        found.append(sum(link.status == psutil.CONN_ESTABLISHED and link.laddr.port == running.data for link in links))
    return found


def _all_up(running: Gateway) -> bool:
    return all(each["up"] for each in running.get("/status").json()["workers"])


def _share(running: Gateway, clients: ExitStack, count: int) -> None:
    """Connect so many more, and on until no worker has clearly more than the other.

    A worker that gets no time for some milliseconds is not waited for, and the other takes its part; they are even again once both run.
    """
    there = sum(_held(running))

    def connect(more: int) -> None:
        nonlocal there
        for _ in range(more):
            clients.enter_context(socket.create_connection(("127.0.0.1", running.data)))
        there += more
        wait_for(lambda: sum(_held(running)) == there, why=lambda: str(_held(running)))

    connect(count)
    while max(_held(running)) > 0.65 * there:
        assert there < MOST, _held(running)
        connect(5)


def test_connections_are_shared_also_with_a_worker_that_came_later(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), workers=WORKERS, headers_timeout="10m")) as running, ExitStack() as clients:
        wait_for(lambda: _all_up(running))
        _share(running, clients, MANY)
        os.kill(running.workers()[0], signal.SIGKILL)
        wait_for(lambda: running.get("/status").json()["workers"][0]["restarts"] and _all_up(running))
        _share(running, clients, sum(_held(running)))
        assert running.ask().status_code == 200
