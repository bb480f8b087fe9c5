"""Requests of the gateway itself to given servers, beside the requests of clients: bounded in number, time and size.

The rules: a side request is not counted as in flight, is not retried on another server, and is no failure of its server. A server that
does not serve a path gets no further request for it within ``FORGET_AFTER`` seconds.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from weakref import WeakKeyDictionary

from upstream.balancing.attempt import UpstreamResponse
from upstream.balancing.server import Server
from upstream.http.connection import Connection
from upstream.http.deadlines import Deadlines, Timeouts
from upstream.http.errors import StaleConnection, TotalTimeout

AT_ONCE = 8
"""Side requests that a worker sends at the same time."""
LARGEST_RESPONSE = 16 * 1024 * 1024
"""Bytes that are read of a response."""
FORGET_AFTER = 600.0
"""Seconds for which a worker remembers that a server does not serve a path."""
NOT_SERVED = frozenset({403, 404, 405, 501})
"""Statuses of a server for a path that it does not serve."""


class SideRequests:
    """The side requests of one worker."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._refused: WeakKeyDictionary[Server, dict[str, float]] = WeakKeyDictionary()

    def may_serve(self, server: Server, path: str) -> bool:
        """Return whether a request to this path makes sense: the server has not refused the path lately."""
        refused_at = self._refused.get(server, {}).get(path)
        return refused_at is None or monotonic() - refused_at > FORGET_AFTER

    async def post(self, server: Server, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Send a JSON body. Returns the status and the body of the response. Raises UpstreamError, at the latest after ``seconds``.

        ``Deadlines`` may be late by one tick.
        """
        expires = monotonic() + seconds
        async with self._slots:
            status, content = await self._send(server, path, body, expires)
        if status in NOT_SERVED:
            self._refused.setdefault(server, {})[path] = monotonic()
        return status, content

    async def _send(self, server: Server, path: str, body: bytes, expires: float) -> tuple[int, bytes]:
        while True:
            seconds = expires - monotonic()
            if seconds <= 0.0:
                raise TotalTimeout(server.name, "no time is left for a side request")
            connection = server.take_idle_connection() or await server.connect(seconds)
            try:
                return await self._exchange(server, connection, path, body, expires)
            except StaleConnection:
                continue  # each one is closed, so this ends

    async def _exchange(self, server: Server, connection: Connection, path: str, body: bytes, expires: float) -> tuple[int, bytes]:
        seconds = expires - monotonic()
        response = UpstreamResponse(server, connection, Timeouts(seconds, seconds, seconds, seconds), sent_at=monotonic())
        self._deadlines.watch(response)
        try:
            head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (server.request_head(path), len(body))
            connection.send(head + body, response)
            content = await response.read_body(LARGEST_RESPONSE)
            return response.status, content
        finally:
            self._deadlines.forget(response)
            response.close()
