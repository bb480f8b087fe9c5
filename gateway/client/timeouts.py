"""How long a client may keep its connection waiting: decisions only, no I/O.

A connection is looked at about once a second, with what it waits for then and how many bytes have moved so far. The
rule: only a wait that is the client's own counts. When the connection waits for something else, or for the same in
another request, the clock begins anew; so deadlines are late by up to two looks, never early.
"""

from __future__ import annotations

from enum import Enum, auto

from gateway.snapshot.snapshot import Clients

KEEP_ALIVE = 75.0
"""Seconds for which a connection may be idle between two requests."""
LEAST_RATE = 1024
"""Bytes per second that a body must bring, on average over each ``body_timeout``: who sends a byte at a time is cut too."""


class Wait(Enum):
    """What a connection waits for."""

    NOTHING = auto()
    """The next step is the gateway's."""
    FIRST_BYTE = auto()
    """A connection that has said nothing yet."""
    HEAD = auto()
    """The rest of a head."""
    BODY = auto()
    """The rest of a body."""
    REST = auto()
    """The rest of a body that nobody reads: the request has been answered."""
    READER = auto()
    """That the client takes what was written."""
    NEXT_REQUEST = auto()


class Patience:
    """The clock of one connection."""

    __slots__ = ("_mark", "_mark_at", "_message", "_moved", "_moved_at", "_wait")

    def __init__(self) -> None:
        self._wait = Wait.NOTHING
        self._message: object = None
        self._moved_at = self._mark_at = 0.0
        self._moved = self._mark = 0

    def is_over(self, wait: Wait, message: object, moved: int, now: float, clients: Clients) -> bool:
        """Whether the client has kept the connection waiting for too long.

        ``message`` is what tells one request's wait from another's of the same kind. ``moved``: bytes of the body so far
        for BODY, bytes that were taken for READER; it may fall, which is no progress. ``now`` is ``time.monotonic``.
        """
        if wait is not self._wait or message is not self._message:
            self._begin(wait, message, moved, now)
            return False
        if moved > self._moved:
            self._moved_at = now
        self._moved = moved
        if wait is Wait.BODY and self._is_too_slow(now, clients.body_timeout):
            return True
        return now - self._moved_at > _limit(wait, clients)

    def _begin(self, wait: Wait, message: object, moved: int, now: float) -> None:
        self._wait, self._message = wait, message
        self._moved, self._moved_at = moved, now
        self._mark, self._mark_at = moved, now

    def _is_too_slow(self, now: float, period: float) -> bool:
        """Did a whole period bring too little? Then the next one begins."""
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
