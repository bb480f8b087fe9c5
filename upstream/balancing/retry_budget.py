"""How many requests may be sent a second time: a share of the traffic, so that retries cannot double a load that is too much already.

The rule: worked out from the count of choices when a retry is wanted, so a request that needs none pays nothing.
"""

from __future__ import annotations

SHARE = 0.1
"""Retries that each request earns."""

MOST = 100.0
"""Retries that can be saved up: those of the last thousand requests."""

FLOOR, EVERY = 10.0, 1.0
"""Retries there are without any traffic, and the seconds in which one of them comes back."""


class RetryBudget:
    """The retries of one model's servers in one worker."""

    __slots__ = ("_left", "_seen", "_since")

    def __init__(self) -> None:
        self._left = FLOOR
        self._seen = 0
        self._since = 0.0

    def try_spend(self, asked: int, now: float) -> bool:
        """Whether one more is allowed, which is then used up. ``asked``: requests so far; ``now``: monotonic seconds."""
        earned = self._left + SHARE * (asked - self._seen)
        rested = min(FLOOR, self._left + (now - self._since) / EVERY)
        self._left = max(min(earned, MOST), rested)
        self._seen, self._since = asked, now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
