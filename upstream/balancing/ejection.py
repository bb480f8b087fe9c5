"""When a server that fails is passed over, and for how long. Pure: every decision is one of an error and a time.

The rules: only what a server did itself counts against it, never a client's leaving, a bad request or a limit of our own;
what fails while it is passed over counts no more, so a crowd of requests that die together is one failure; a success
forgives everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from upstream.http.errors import (
    Aborted,
    BadResponse,
    ConnectFailed,
    Disconnected,
    EngineDead,
    FirstByteTimeout,
    IdleTimeout,
    LocalLimit,
    ServerError,
    StaleConnection,
    TotalTimeout,
    UpstreamError,
)

ENOUGH = 3
"""How much has to come together, with no success between, for a server to be passed over."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds for which it is passed over the first time, doubled each further time, up to the longest."""

WEIGHTS: Mapping[type[UpstreamError], int] = MappingProxyType(
    {
        ConnectFailed: ENOUGH,  # nobody listens there: the next request would find the same
        Disconnected: 1,
        FirstByteTimeout: 1,
        IdleTimeout: 1,
        BadResponse: 1,
        EngineDead: 1,
        Aborted: 1,
        ServerError: 0,  # any 500 may be the doing of its request
        TotalTimeout: 0,  # it worked until the limit
        StaleConnection: 0,  # an idle limit is no failure
        LocalLimit: 0,
    }
)
"""What each error counts; a subclass counts as its base does."""


def weight(error: UpstreamError) -> int:
    """What an error counts against the server that it came from."""
    return next((WEIGHTS[kind] for kind in type(error).__mro__ if kind in WEIGHTS), 0)


class EjectionState:
    """What is held against one server. Times are in seconds of the monotonic clock."""

    __slots__ = ("_pause", "_score", "ejected_until")

    def __init__(self) -> None:
        self._score = 0
        self._pause = 0.0
        self.ejected_until = 0.0
        """Until when it is passed over; 0: it is not."""

    @property
    def has_failures(self) -> bool:
        """Something has failed since the last success."""
        return self._score > 0

    def record_failure(self, error: UpstreamError, now: float) -> bool:
        """Count an error; returns whether the server is passed over from now on."""
        if now < self.ejected_until:
            return False
        self._score += weight(error)
        if self._score < ENOUGH:
            return False
        self._score = ENOUGH - 1  # when it is tried again, one more failure is enough
        self._pause = min(2 * self._pause, LONGEST_PAUSE) or FIRST_PAUSE
        self.ejected_until = now + self._pause
        return True

    def expire(self, now: float) -> bool:
        """Whether the pause is over and it may be tried again; told once."""
        if not self.ejected_until or now < self.ejected_until:
            return False
        self.ejected_until = 0.0
        return True

    def reset(self) -> None:
        """Forgive everything."""
        self._score, self._pause, self.ejected_until = 0, 0.0, 0.0
