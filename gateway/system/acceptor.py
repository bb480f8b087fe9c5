"""Who takes a connection, where several workers listen on one socket.

Left to themselves, the worker that wakes first takes all that have arrived, and keeps them: clients' connections live long. So
each worker writes down how many it has, in memory that all see, and stands back for a moment when it is ahead of another. The
rule: standing back delays a connection by ``PAUSE`` at most, whatever the others do; a worker that is gone holds up nobody.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

PAUSE = 0.001
"""Seconds for which a worker that is ahead leaves connections to the others."""
_EXHAUSTED = 0.1  # seconds without taking any when the system has no more descriptors
_AT_ONCE = 16  # connections taken in one turn of the loop
_CELL = struct.Struct("<Q")
_NOBODY = 2**64 - 1
_log = logging.getLogger("vllm_gateway")


class Seats:
    """How many connections each worker has. ``fd`` is what a child process inherits."""

    def __init__(self, fd: int, number: int = 0) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self._own = number * _CELL.size
        self._others = [place for place in range(0, size, _CELL.size) if place != self._own]

    @classmethod
    def create(cls, workers: int) -> Seats:
        """For so many workers, none of which is there yet."""
        fd = os.memfd_create("seats")
        os.write(fd, _CELL.pack(_NOBODY) * workers)
        return cls(fd)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def vacate(self, number: int) -> None:
        """This worker is gone."""
        _CELL.pack_into(self._map, number * _CELL.size, _NOBODY)

    def note(self, count: int) -> None:
        """This worker has so many connections."""
        _CELL.pack_into(self._map, self._own, count)

    def is_ahead(self, count: int) -> bool:
        """Whether that is clearly more than another worker has."""
        least = min((_CELL.unpack_from(self._map, place)[0] for place in self._others), default=_NOBODY)
        return bool(count > least + 2 + least // 16)


Begin = Callable[[socket.socket], Coroutine[Any, Any, Any]]
"""Makes a connection of a socket that was accepted."""


class Acceptor:
    """Takes connections from a listening socket, which other processes may share. ``held``: how many this one has."""

    def __init__(self, listener: socket.socket, begin: Begin, seats: Seats, held: Callable[[], int]) -> None:
        self._listener = listener
        self._begin = begin
        self._seats = seats
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._beginnings: set[asyncio.Task[Any]] = set()
        self._waiting: asyncio.TimerHandle | None = None
        self._stood_back = False
        self._told = False  # that none can be accepted
        listener.setblocking(False)
        self._look_on()

    def close(self) -> None:
        """Take no more."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._waiting is not None:
            self._waiting.cancel()

    def note(self) -> None:
        """Tell the others how many there are now; also called by the clock, since connections end by themselves."""
        self._seats.note(self._count)

    @property
    def _count(self) -> int:
        return self._held() + len(self._beginnings)

    def _look_on(self) -> None:
        self._waiting = None
        self.note()
        self._loop.add_reader(self._listener, self._arrived)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._waiting = self._loop.call_later(seconds, self._look_on)

    def _arrived(self) -> None:
        """Somebody waits to be accepted; perhaps another worker has been quicker."""
        for _ in range(_AT_ONCE):
            if not self._stood_back and self._seats.is_ahead(self._count):
                self._stood_back = True
                self._pause(PAUSE)
                return
            self._stood_back = False
            if not self._take_one():
                return

    def _take_one(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as error:  # no descriptors or no memory: it waits in the kernel's queue
            self._exhausted(error)
            return False
        self._told = False
        connection.setblocking(False)
        task = self._loop.create_task(self._begun(connection))
        self._beginnings.add(task)
        task.add_done_callback(self._beginnings.discard)
        self.note()
        return True

    def _exhausted(self, error: OSError) -> None:
        if not self._told:
            _log.warning("no connection can be accepted at the moment: %s", error.strerror)
            self._told = True
        self._pause(_EXHAUSTED)

    async def _begun(self, connection: socket.socket) -> None:
        try:
            await self._begin(connection)
        except OSError:  # it left, or its TLS handshake failed
            connection.close()
