"""Pauses between attempts: the one definition for all parts that try again after a failure.

The rule: a pause doubles with each failure in a row, up to the longest one, and a success resets it. Pauses before a request to another
system vary at random, so that gateways which lost it at the same moment do not return to it together.
"""

from __future__ import annotations

import random

_MOST_DOUBLINGS = 32  # a server may fail for years


def doubled(first: float, longest: float, failures: int) -> float:
    """Return the pause in seconds after this number of failures in a row, 1 or more."""
    return min(longest, first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


class Backoff:
    """The pauses of one task, in seconds.

    ``spread``: the share by which a pause is varied, in both directions. ``failures``: how many in a row there were already.
    """

    def __init__(self, first: float, longest: float, spread: float = 0.2, failures: int = 0) -> None:
        self._first, self._longest, self._spread = first, longest, spread
        self._failures = failures

    def next_pause(self) -> float:
        """Return the pause after one more failure."""
        self._failures += 1
        varied = random.uniform(1.0 - self._spread, 1.0 + self._spread)  # noqa: S311  it spreads load, and is no secret
        return doubled(self._first, self._longest, self._failures) * varied

    def reset(self) -> None:
        """Start with the first pause again, after a success."""
        self._failures = 0
