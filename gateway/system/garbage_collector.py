"""When Python's garbage collector runs.

A full collection examines every object of the process. With thousands of open streams it takes a tenth of a second, in which no byte is
relayed, and CPython starts one whenever their number has grown by a quarter. Requests leave no cycles behind, so it would find nothing. The
rules: young objects are collected as usual; a full collection runs while no request is served, or once in an hour.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

_NEVER = 2**31 - 1  # the largest threshold
_YOUNG = 5000
"""The youngest objects are collected after this many new objects. With CPython's 700, the objects of some dozens of concurrent requests
start a
collection again and again, which finds nothing."""
_MIDDLE = 1
"""The survivors of young collections are collected after this many young collections. So one collection examines at most 10,000 objects."""
_IDLE_INTERVAL = 60.0  # seconds between two full collections of an idle process
_BUSY_INTERVAL = 3600.0  # seconds after which a process that is never idle is collected, too


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector for the block.

    The collector examines every new container. With it, parsing a JSON body of a million lists takes five times as long, and such a
    document contains no cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FullCollections:
    """Starts the full collections of this process. ``collect`` and ``clock`` are replaced in tests."""

    def __init__(self, collect: Callable[[], object] = gc.collect, clock: Callable[[], float] = monotonic) -> None:
        self._collect = collect
        self._clock = clock
        self._last = clock()
        self._young = _young_collections()

    def tick(self, *, idle: bool) -> None:
        """Run a full collection if it is time for one. Called about once a second. ``idle``: no request is being served."""
        if (self._clock() - self._last) < (_IDLE_INTERVAL if idle else _BUSY_INTERVAL) or _young_collections() == self._young:
            return
        self._collect()
        self._last, self._young = self._clock(), _young_collections()


def take_over() -> FullCollections:
    """Collect once, exempt all objects that exist so far, and disable CPython's own full collections in this process.

    Objects made during start-up live as long as the process: the collector need not examine them again.
    """
    gc.collect()
    gc.freeze()
    # Since Python 3.14 the second threshold is the share of older objects that each collection examines, and its default is right.
    gc.set_threshold(_YOUNG, _MIDDLE if sys.version_info < (3, 14) else gc.get_threshold()[1], _NEVER)
    return FullCollections()


def _young_collections() -> int:
    """Return how often generation 1 was collected: if it was not, there is nothing new to examine."""
    return int(gc.get_stats()[1]["collections"])
