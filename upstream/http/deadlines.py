"""One coarse clock for all exchanges of a worker, instead of a timer for each.

Setting and cancelling a timer for every request and chunk costs more than relaying it. Here an exchange
only notes the time of its last byte; a single tick, a few times a second, looks at all of them. Deadlines are
therefore late by up to ``TICK`` seconds, never early.

Times are ``time.monotonic``: uvloop's own clock counts whole milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Protocol

TICK = 0.25


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the first byte of the answer, between two of its bytes, and in all."""

    connect: float = 2.0
    first_byte: float = 120.0
    idle: float = 60.0
    total: float = 3600.0


class Watched(Protocol):
    """What can be overdue."""

    def check(self, now: float) -> None:
        """Act if a deadline has passed; ``now`` is ``time.monotonic``."""


class Deadlines:
    """The set of what is watched, and its tick."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, item: Watched) -> None:
        self._watched.add(item)

    def forget(self, item: Watched) -> None:
        self._watched.discard(item)

    def tick(self) -> None:
        """Check everything once."""
        now = monotonic()
        for item in tuple(self._watched):
            item.check(now)
