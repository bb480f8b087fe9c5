"""The connections of the admin port and the admin socket: their timeouts, and the limit on their number.

uvicorn alone waits without a limit for a request's headers, and accepts connections as long as there are file descriptors. The rule: a
connection without a request in progress is closed when a new connection needs its slot, so that a probe always gets a response.
"""

from __future__ import annotations

import asyncio
from fcntl import ioctl
from struct import Struct
from termios import TIOCOUTQ
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.client.timeouts import Wait, WaitTimer
from gateway.snapshot.snapshot import Clients

MAX_CONNECTIONS = 256
"""Open connections of one listener. Dashboards, probes and commands need few connections."""
MAX_HEADERS = 64 * 1024
"""Bytes of a request line with its headers."""
_COUNT = Struct("i")  # a result of ioctl


class AdminConnections:
    """The connections of one listener, the oldest first."""

    def __init__(self) -> None:
        self._open: dict[AdminProtocol, None] = {}

    def add(self, connection: AdminProtocol) -> None:
        """Add a connection. If there are too many, the oldest connection without a request in progress is closed."""
        self._open[connection] = None
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(each for each in self._open if not each.is_busy)  # the new one itself, if all others are busy
            self.remove(oldest)
            oldest.transport.abort()

    def remove(self, connection: AdminProtocol) -> None:
        """Remove a connection that is closed, or about to be."""
        self._open.pop(connection, None)

    def check(self, now: float, clients: Clients) -> None:
        """Close connections whose timeout has expired. Call it about once a second with the time of the monotonic clock."""
        for each in tuple(self._open):
            each.check(now, clients)

    def close(self) -> None:
        """Close all connections without a request in progress."""
        for each in tuple(self._open):
            each.shutdown()


class AdminProtocol(HttpToolsProtocol):
    """uvicorn's protocol with timeouts."""

    cycle: Any  # None before the first request

    def __init__(self, *args: Any, connections: AdminConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self._reading = Wait.FIRST_BYTE  # what the parser expects
        self._headers_size = 0
        self._timer = WaitTimer()

    @property
    def is_busy(self) -> bool:
        """Whether a request was received whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    # Transport callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._headers_size += len(data)
        super().data_received(data)
        if self._reading is Wait.HEAD and self._headers_size > MAX_HEADERS:
            self.transport.close()

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._reading = Wait.HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reading, self._headers_size = Wait.REST, 0  # no route reads a body
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reading, self._headers_size = Wait.NEXT_REQUEST, 0
        super().on_message_complete()

    # Timeouts

    def check(self, now: float, clients: Clients) -> None:
        """Close the connection if its timeout has expired."""
        if unsent := self._unsent():
            wait, progress = Wait.READER, -unsent  # grows while the client reads
        else:
            wait, progress = Wait.NOTHING if self.is_busy or self.transport.is_closing() else self._reading, 0
        if self._timer.has_expired(wait, self.headers, progress, now, clients):
            if wait is Wait.READER:
                self.transport.abort()
            else:
                self.transport.close()

    def _unsent(self) -> int:
        """Return the bytes that the client's kernel has not received.

        Those in the socket's own buffer count too: small events, which a client never reads, fit into it for hours.
        """
        if self.transport.is_closing():
            return self.transport.get_write_buffer_size()
        (in_kernel,) = _COUNT.unpack(ioctl(self.transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(_COUNT.size)))
        return self.transport.get_write_buffer_size() + int(in_kernel)
