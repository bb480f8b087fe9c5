"""Count the requests of each key that are in flight.

The rule: a slot is held by a ``with`` block, and every exit from the block frees it once.
"""

from __future__ import annotations

from gateway.snapshot.snapshot import Key


class InflightCounts:
    """Requests in flight by key. A key's slot exists from its first request on, as long as the worker lives."""

    def __init__(self) -> None:
        self._slots: dict[str, InflightSlot] = {}

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return sum(slot.in_flight for slot in self._slots.values())

    def slot(self, key: Key) -> InflightSlot:
        """Return the slot of a key; a request holds it in a ``with``."""
        return self._slots.get(key.id) or self._slots.setdefault(key.id, InflightSlot())


class InflightSlot:
    """A key's requests in flight. Any number of ``with`` blocks may hold it at the same time."""

    __slots__ = ("in_flight",)

    def __init__(self) -> None:
        self.in_flight = 0

    def __enter__(self) -> None:
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
