"""Admission: what a key may have in flight, and the ticket that counts it.

The rule: a ticket is a ``with``; leaving it, on whatever way, gives it back once.
"""

from __future__ import annotations

from collections import Counter

from gateway.state import Key


class Admission:
    """Requests in flight by key. An entry exists only while its count is not zero."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """How many requests hold a ticket."""
        return self._in_flight.total()

    def ticket(self, key: Key) -> Ticket:
        """Admit a request of a key for the length of a ``with``."""
        return Ticket(self._in_flight, key.id)


class Ticket:
    """One admitted request. Written out, because ``contextlib`` costs four times as much and every request has one."""

    __slots__ = ("_counts", "_key")

    def __init__(self, counts: Counter[str], key: str) -> None:
        self._counts = counts
        self._key = key

    def __enter__(self) -> None:
        self._counts[self._key] += 1

    def __exit__(self, *_: object) -> None:
        self._counts[self._key] -= 1
        if not self._counts[self._key]:
            del self._counts[self._key]
