"""One coarse clock for all exchanges of a worker, instead of a timer for each.

Setting and cancelling a timer for every request and chunk costs more than relaying it. An exchange only stores the time of its last byte,
and a tick checks all exchanges a few times a second. A large number is checked in slices, spread over the time until the next tick, so
that no chunk waits for the check of thousands of streams. The rule: a deadline takes effect up to two ticks late, never early.

Times are ``time.monotonic``, because uvloop's clock has a resolution of a millisecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol, TypeVar

TICK = 0.25
SLICE = 128
"""Objects that are checked in one event-loop iteration: a check takes about a microsecond."""


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


T = TypeVar("T")
W = TypeVar("W", bound=Watched)


def visit_in_slices(items: Sequence[T], seconds: float, visit: Callable[[Sequence[T]], None]) -> None:
    """Pass all items to ``visit``, ``SLICE`` in one event-loop iteration: the first ones now, the others within this time."""
    visit(items[:SLICE])
    if len(items) > SLICE:
        call_later = asyncio.get_running_loop().call_later
        for start in range(SLICE, len(items), SLICE):
            call_later(seconds * start / len(items), visit, items[start : start + SLICE])


def check_all(watched: Set[W], seconds: float) -> None:
    """Check each object of the set once, within this time. Objects that leave the set before their turn are not checked."""
    visit_in_slices(tuple(watched), seconds, partial(_check, watched))


def _check(watched: Set[W], items: Sequence[W]) -> None:
    now = monotonic()
    for item in items:
        if item in watched:
            item.check(now)


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
        """Check every watched object once before the next tick."""
        check_all(self._watched, TICK)
