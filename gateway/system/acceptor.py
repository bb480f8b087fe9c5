"""Sharing the connections of one listening socket among several workers.

Without it, the worker that wakes first accepts all waiting connections and keeps them, because clients' connections live long. So each
worker publishes its number of connections in shared memory, and pauses for a moment when it is ahead of another worker. The rules: a pause
delays a connection by at most ``PAUSE``, and a worker that has exited delays none. A connection counts from the moment in which it is
accepted until it has closed, and each change is published at once: other workers would accept too many connections by an old number.
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
"""Seconds for which a worker with more connections leaves new connections to other workers."""
_EXHAUSTED_PAUSE = 0.1  # seconds without accepting after file descriptors or memory have run out
_MAX_AT_ONCE = 16  # connections accepted in one event-loop iteration
_CELL = struct.Struct("<Q")
_VACANT = 2**64 - 1
_log = logging.getLogger("vllm_gateway")


class Seats:
    """The number of connections of each worker, in shared memory. A child process inherits ``fd``."""

    def __init__(self, fd: int, number: int = 0) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self._own = number * _CELL.size
        self._others = [offset for offset in range(0, size, _CELL.size) if offset != self._own]

    @classmethod
    def create(cls, workers: int) -> Seats:
        """Create the memory for this number of workers. No worker runs yet."""
        fd = os.memfd_create("seats")
        os.write(fd, _CELL.pack(_VACANT) * workers)
        return cls(fd)

    def close(self) -> None:
        """Release the memory."""
        self._map.close()
        os.close(self.fd)

    def vacate(self, number: int) -> None:
        """Note that a worker has exited."""
        _CELL.pack_into(self._map, number * _CELL.size, _VACANT)

    def publish(self, count: int) -> None:
        """Publish this worker's number of connections."""
        _CELL.pack_into(self._map, self._own, count)

    def count(self, number: int) -> int:
        """Return the number of connections of a worker."""
        found: int = _CELL.unpack_from(self._map, number * _CELL.size)[0]
        return 0 if found == _VACANT else found

    def is_ahead(self, count: int) -> bool:
        """Return whether this number of connections is clearly more than another worker has."""
        least = min((_CELL.unpack_from(self._map, offset)[0] for offset in self._others), default=_VACANT)
        return bool(count > least + 2 + least // 32)


Connect = Callable[[socket.socket], Coroutine[Any, Any, Any]]
"""Creates the transport and protocol of an accepted socket."""


class Acceptor:
    """Accepts connections on a listening socket, which other processes may share.

    A worker that shares it calls ``connection_closed`` after each of its connections.
    """

    def __init__(self, listener: socket.socket, connect: Connect, seats: Seats) -> None:
        self._listener = listener
        self._connect = connect
        self._seats = seats
        self._loop = asyncio.get_running_loop()
        self._connections = 0
        self._connecting: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_paused = False
        self._has_warned = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more connections, and close the socket."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._timer is not None:
            self._timer.cancel()

    def connection_closed(self) -> None:
        """Note that one of the accepted connections has closed."""
        self._count(-1)

    def _count(self, change: int) -> None:
        self._connections += change
        self._seats.publish(self._connections)

    def _resume(self) -> None:
        self._timer = None
        self._count(0)
        self._loop.add_reader(self._listener, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        """Accept waiting connections. Another worker may have accepted them first."""
        for _ in range(_MAX_AT_ONCE):
            if not self._has_paused and self._seats.is_ahead(self._connections):
                self._has_paused = True
                self._pause(PAUSE)
                return
            self._has_paused = False
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as error:  # no file descriptors or no memory: the connection stays in the kernel's backlog
            if not self._has_warned:
                _log.warning("connections cannot be accepted at the moment: %s", error.strerror)
                self._has_warned = True
            self._pause(_EXHAUSTED_PAUSE)
            return False
        self._has_warned = False
        connection.setblocking(False)
        task = self._loop.create_task(self._connect_accepted(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self._count(1)
        return True

    async def _connect_accepted(self, connection: socket.socket) -> None:
        try:
            await self._connect(connection)
        except OSError:  # the client has disconnected, or its TLS handshake failed
            connection.close()
            self.connection_closed()
