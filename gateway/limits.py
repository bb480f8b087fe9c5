"""Admission: what a key may have in flight, and the ticket that counts it.

The rule: a ticket is a ``with``; leaving it, on whatever way, gives it back once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.state import Key


class Admission:
    """Requests in flight by key. An entry exists only while its count is not zero."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """How many requests hold a ticket."""
        return self._in_flight.total()

    @contextmanager
    def ticket(self, key: Key) -> Iterator[None]:
        """Admit a request of a key for the length of the block."""
        self._in_flight[key.id] += 1
        try:
            yield
        finally:
            self._in_flight[key.id] -= 1
            if not self._in_flight[key.id]:
                del self._in_flight[key.id]
