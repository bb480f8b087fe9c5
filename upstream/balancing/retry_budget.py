"""The budget of retries: a share of the traffic, so that retries cannot double the load of overloaded servers.

The rule: it is computed from the number of requests when a retry is wanted, so a request without a retry costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.1
"""Retries that each request adds."""

LARGEST = 100.0
"""Retries that can accumulate: as many as the last thousand requests earn."""

MINIMUM, INTERVAL = 10.0, 1.0
"""Number of retries that are allowed without any traffic, and the seconds after which a used retry is available again."""


@dataclass(slots=True, eq=False)
class RetryBudget:
    """The retries of one model's servers in one worker."""

    _left: float = MINIMUM
    _requests: int = 0
    _since: float = 0.0

    def try_spend(self, requests: int, now: float) -> bool:
        """Return whether one more retry is allowed, and spend it. ``requests``: their number so far. ``now``: monotonic seconds."""
        earned = self._left + SHARE * (requests - self._requests)
        recovered = min(MINIMUM, self._left + (now - self._since) / INTERVAL)
        self._left = max(min(earned, LARGEST), recovered)
        self._requests, self._since = requests, now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
