"""One coarse clock for all exchanges of a worker, instead of a timer for each.

Setting and cancelling a timer for every request and chunk costs more than relaying it. An exchange only stores the time of its last byte,
and one tick checks all exchanges a few times a second. Deadlines are therefore up to ``TICK`` seconds late, never early.

Times are ``time.monotonic``, because uvloop's clock has a resolution of a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Protocol

TICK = 0.25


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Maximum seconds to connect, to the first byte of the response, between two of its bytes, and in total."""

    connect: float = 2.0
    first_byte: float = 120.0
    idle: float = 60.0
    total: float = 3600.0


class Watched(Protocol):
    """An object with a deadline."""

    def check(self, now: float) -> None:
        """Act if the deadline has passed. ``now``: ``time.monotonic``."""


class Deadlines:
    """The watched objects, and their tick."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, item: Watched) -> None:
        self._watched.add(item)

    def forget(self, item: Watched) -> None:
        self._watched.discard(item)

    def tick(self) -> None:
        """Check every watched object once."""
        now = monotonic()
        for item in tuple(self._watched):
            item.check(now)
