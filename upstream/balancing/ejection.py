"""Decide when a failing server is ejected, and for how long. Pure: every decision depends on an error and a time.

The rules: only the server's own failures count, never a client's disconnect, an invalid request or a limit of the gateway. Failures during
an ejection do not count, so many requests that fail together are one failure. A success resets everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from upstream.backoff import Backoff
from upstream.http import errors
from upstream.http.errors import UpstreamError

THRESHOLD = 3
"""The score, without a success in between, at which a server is ejected."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds of the first ejection and of the longest one. Each further ejection doubles the time."""

WEIGHTS: Mapping[type[UpstreamError], int] = {
    errors.ConnectFailed: THRESHOLD,  # no process listens: the next request would fail too
    errors.Disconnected: 1,
    errors.FirstByteTimeout: 1,
    errors.IdleTimeout: 1,
    errors.Unresponsive: 1,
    errors.BadResponse: 1,
    errors.EngineDead: 1,
    errors.Aborted: 1,
    errors.ServerError: 0,  # the request may have caused a 500
    errors.TotalTimeout: 0,  # the server worked until the limit
    errors.StaleConnection: 0,  # an idle timeout is not a failure
    errors.LocalLimit: 0,
    errors.Moved: 0,
    errors.Preempted: 0,
}
"""The score of each error. A subclass counts as its base class does."""


def weight(error: UpstreamError) -> int:
    """Return the score of an error."""
    return next((WEIGHTS[kind] for kind in type(error).__mro__ if kind in WEIGHTS), 0)


@dataclass(slots=True, eq=False)
class EjectionState:
    """The failures of one server, and its ejection. Times are seconds of the monotonic clock."""

    _score: int = 0
    _backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE, spread=0.0))
    ejected_until: float = 0.0
    """The end of the ejection; 0 if the server is not ejected."""

    @property
    def has_failures(self) -> bool:
        """Whether a request has failed since the last success."""
        return self._score > 0

    def record_failure(self, error: UpstreamError, now: float) -> bool:
        """Count an error, and return whether the server is now ejected."""
        if now < self.ejected_until:
            return False
        self._score += weight(error)
        if self._score < THRESHOLD:
            return False
        self._score = THRESHOLD - 1  # after the ejection, one more failure is enough
        self.ejected_until = now + self._backoff.next_pause()
        return True

    def expire(self, now: float) -> bool:
        """Return True once, when the ejection has expired and the server gets requests again."""
        if not self.ejected_until or now < self.ejected_until:
            return False
        self.ejected_until = 0.0
        return True

    def reset(self) -> None:
        """Forget all failures, and end the ejection."""
        self._score, self.ejected_until = 0, 0.0
        self._backoff.reset()
