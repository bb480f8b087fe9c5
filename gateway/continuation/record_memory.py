"""The memory of the record of a stream, which is reserved in steps.

The rule: a record grows only by what was reserved before. A record that would be longer than its limit gets no more memory.
"""

from __future__ import annotations

from collections.abc import Callable


class RecordMemory:
    """The memory of one record. ``hold`` reserves so many bytes in all, and returns whether they are free."""

    __slots__ = ("_hold", "_limit", "_reserved", "_step", "_unused")

    def __init__(self, hold: Callable[[int], bool], step: int, limit: int) -> None:
        self._hold: Callable[[int], bool] = hold
        self._step: int = step
        self._limit: int = limit
        self._reserved: int = 0
        self._unused: int = 0

    def take(self, size: int) -> bool:
        """Use this number of bytes. Returns False if the record is too long, or without memory."""
        self._unused -= size
        if self._unused >= 0:
            return True
        more = -(self._unused // self._step) * self._step
        self._reserved += more
        self._unused += more
        return self._reserved <= self._limit and self._hold(self._reserved)
