"""Tickets: how many requests of each key are in flight.

The rule: a ticket is a ``with``; leaving it, on whatever way, gives it back once.
"""

from __future__ import annotations

from gateway.snapshot.snapshot import Key


class InflightCounts:
    """Requests in flight by key. A key has its ticket from its first request on, for as long as the worker lives."""

    def __init__(self) -> None:
        self._slots: dict[str, InflightSlot] = {}

    @property
    def in_flight(self) -> int:
        """How many requests are admitted."""
        return sum(ticket.in_flight for ticket in self._slots.values())

    def slot(self, key: Key) -> InflightSlot:
        """Admit a request of a key for the length of a ``with``."""
        return self._slots.get(key.id) or self._slots.setdefault(key.id, InflightSlot())


class InflightSlot:
    """A key's requests in flight. Any number of ``with`` may be in it at a time: it holds no more than their number."""

    __slots__ = ("in_flight",)

    def __init__(self) -> None:
        self.in_flight = 0

    def __enter__(self) -> None:
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
