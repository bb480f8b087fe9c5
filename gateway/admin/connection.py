"""Connections of the admin port and of the admin socket: how long each may keep control waiting, and how many there may be.

uvicorn alone waits for ever for a head, and takes connections as long as there are descriptors. The rules: whoever only holds a
connection makes room for who comes next, so that a probe is answered whatever else is open; what is being answered is left alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.client.timeouts import Patience, Wait
from gateway.snapshot.snapshot import Clients

MOST = 256
"""Connections at once: dashboards, probes and commands are a handful."""
MAX_HEAD = 64 * 1024
"""Bytes of a request's head."""


class Hall:
    """The connections of one listener, the one that came first at the front."""

    def __init__(self) -> None:
        self._present: dict[AdminProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._present)

    def enter(self, connection: AdminProtocol) -> None:
        """One more; where there are too many, the first that is not being answered has to go."""
        self._present[connection] = None
        if len(self._present) > MOST:
            longest = next(each for each in self._present if not each.is_busy)  # the new one itself, if need be
            self.leave(longest)
            longest.transport.abort()

    def leave(self, connection: AdminProtocol) -> None:
        """It is gone, or will be at once."""
        self._present.pop(connection, None)

    def check(self, now: float, clients: Clients) -> None:
        """End those that have kept control waiting for too long. Called every second or so with ``time.monotonic``."""
        for each in tuple(self._present):
            each.check(now, clients)

    def close(self) -> None:
        """End all that are not being answered."""
        for each in tuple(self._present):
            each.shutdown()


class AdminProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with an end to everything that is waited for."""

    cycle: Any  # None before the first request

    def __init__(self, *args: Any, hall: Hall, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hall = hall
        self._reading = Wait.FIRST_BYTE  # what the parser is in
        self._head_size = 0
        self._patience = Patience()

    @property
    def is_busy(self) -> bool:
        """Whether something was asked that has not been answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    # Transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._hall.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hall.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_size += len(data)
        super().data_received(data)
        if self._reading is Wait.HEAD and self._head_size > MAX_HEAD:
            self.transport.close()

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._reading = Wait.HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reading, self._head_size = Wait.REST, 0  # no route reads a body
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reading, self._head_size = Wait.NEXT_REQUEST, 0
        super().on_message_complete()

    # The clock

    def check(self, now: float, clients: Clients) -> None:
        """Act if the other end has kept control waiting for too long."""
        wait, moved = self._awaited()
        if self._patience.is_over(wait, self.headers, moved, now, clients):
            if wait is Wait.READER:
                self.transport.abort()
            else:
                self.transport.close()

    def _awaited(self) -> tuple[Wait, int]:
        """What is waited for, and a number that grows as long as an answer is taken."""
        behind = self.transport.get_write_buffer_size()
        if behind:
            return Wait.READER, -behind
        return (Wait.NOTHING if self.is_busy or self.transport.is_closing() else self._reading), 0
