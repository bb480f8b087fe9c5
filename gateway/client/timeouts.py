"""Decide how long a client may keep its connection waiting. Pure.

Each connection is checked about once a second. The check gets the state that it waits in and the number of bytes moved so far. The rule:
only waiting for the client counts. The timer restarts when the connection waits for something else, or for the same thing in another
request. So a timeout takes effect up to two checks late, never early.
"""

from __future__ import annotations

from enum import Enum, auto

from gateway.snapshot.snapshot import Clients

KEEP_ALIVE = 75.0
"""Seconds for which a connection may be idle between two requests."""
LEAST_RATE = 1024
"""Minimum average bytes per second of a body in each ``body_timeout``, so that a client that sends single bytes is disconnected too."""


class Wait(Enum):
    """The state of a connection, as far as timeouts depend on it."""

    NOTHING = auto()
    """The next step is the gateway's."""
    FIRST_BYTE = auto()
    """Nothing has been received on the connection."""
    HEAD = auto()
    """The request line and headers are incomplete."""
    BODY = auto()
    """The body is incomplete."""
    REST = auto()
    """The body is incomplete, and discarded: the request has been answered."""
    READER = auto()
    """The client has not received all that was written."""
    NEXT_REQUEST = auto()
    """The connection is idle between two requests."""


class WaitTimer:
    """The timer of one connection."""

    __slots__ = ("_mark", "_mark_at", "_message", "_moved", "_moved_at", "_wait")

    def __init__(self) -> None:
        self._wait = Wait.NOTHING
        self._message: object = None
        self._moved_at = self._mark_at = 0.0
        self._moved = self._mark = 0

    def has_expired(self, wait: Wait, message: object, moved: int, now: float, clients: Clients) -> bool:
        """Return whether the client has kept the connection waiting for too long.

        ``message`` is an object that belongs to one request; another object starts the timer again. ``moved``: the bytes of the body so far
        for BODY, the bytes that the client has received for READER. It may fall, which is not progress. ``now`` is ``time.monotonic``.
        """
        if wait is not self._wait or message is not self._message:
            self._wait, self._message = wait, message
            self._moved, self._moved_at = moved, now
            self._mark, self._mark_at = moved, now
            return False
        if moved > self._moved:
            self._moved_at = now
        self._moved = moved
        if wait is Wait.BODY and self._is_too_slow(now, clients.body_timeout):
            return True
        return now - self._moved_at > _limit(wait, clients)

    def _is_too_slow(self, now: float, period: float) -> bool:
        """Return whether too few bytes arrived in a whole period. The next period then starts."""
        passed = now - self._mark_at
        if passed <= period:
            return False
        brought, self._mark, self._mark_at = self._moved - self._mark, self._moved, now
        return brought < LEAST_RATE * passed


def _limit(wait: Wait, clients: Clients) -> float:
    match wait:
        case Wait.FIRST_BYTE | Wait.HEAD:
            return clients.headers_timeout
        case Wait.BODY | Wait.REST:
            return clients.body_timeout
        case Wait.READER:
            return clients.write_timeout
        case Wait.NEXT_REQUEST:
            return KEEP_ALIVE
        case Wait.NOTHING:
            return float("inf")
