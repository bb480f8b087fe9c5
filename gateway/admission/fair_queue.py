"""Order waiting requests by start-time fair queueing (Goyal, Vin and Cheng, 1996), counted in requests.

A waiting item belongs to a flow with a weight. The rules: flows that keep waiting are served in proportion to their weights, to within one
request each, however many items each has. Within a flow, items are served in the order of arrival. Removing an item does not charge its
flow. If the queue is full, the flow with the most items for its weight loses an item, but never its last item.

Pure: no clock, no I/O. The cost grows with the number of waiting flows, not of waiting items.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _Flow(Generic[T]):
    """The items of one flow in order, with the time at which each was queued. ``start`` is the virtual start time of the first item."""

    __slots__ = ("key", "start", "waiting", "weight")

    def __init__(self, key: str, weight: float, start: float) -> None:
        self.key = key
        self.weight = weight
        self.start = start
        self.waiting: dict[T, float] = {}

    def add(self, item: T, since: float) -> None:
        """Add an item in the order of waiting."""
        latest = next(reversed(self.waiting.values()), since)
        self.waiting[item] = since
        if since < latest:  # it was dispatched before and came back without a server
            self.waiting = dict(sorted(self.waiting.items(), key=lambda pair: pair[1]))

    def share(self) -> float:
        """Return the number of items divided by the weight."""
        return len(self.waiting) / self.weight


class FairQueue(Generic[T]):
    """The waiting items. Virtual time restarts when the queue is empty."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._ended: dict[str, float] = {}
        """The virtual time at which the last dispatch of a flow without waiting items ended."""
        self._now = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, in no order between flows."""
        return (item for flow in self._flows.values() for item in flow.waiting)

    @property
    def oldest(self) -> float | None:
        """The time at which the oldest item was queued; None if the queue is empty."""
        return min((next(iter(flow.waiting.values())) for flow in self._flows.values()), default=None)

    def put(self, item: T, key: str, weight: float, since: float) -> None:
        """Append an item to the flow of a key."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(key, weight, max(self._now, self._ended.pop(key, 0.0)))
        flow.weight = weight
        flow.add(item, since)
        self._size += 1

    def pop(self) -> T:
        """Remove and return the next item. Raises ValueError if the queue is empty."""
        flow = min(self._flows.values(), key=lambda flow: flow.start)
        item = next(iter(flow.waiting))
        self._now = flow.start
        flow.start += 1 / flow.weight
        self._remove_from(flow, item)
        return item

    def remove(self, item: T, key: str) -> None:
        """Remove an item that was not dispatched. Raises KeyError if it does not wait."""
        self._remove_from(self._flows[key], item)

    def displaced_by(self, key: str, weight: float) -> T | None:
        """Return the item that a new item of this flow would displace if the queue is full; None if the new item itself is refused.

        It is the latest item of the flow with the most items for its weight. A flow without items may displace an item of any flow that has
        two items.
        """
        own = self._flows.get(key)
        largest = max((flow for flow in self._flows.values() if len(flow.waiting) > 1), key=_Flow.share, default=None)
        if largest is None or largest is own or (own is not None and largest.share() <= (len(own.waiting) + 1) / weight):
            return None
        return next(reversed(largest.waiting))

    def _remove_from(self, flow: _Flow[T], item: T) -> None:
        del flow.waiting[item]
        self._size -= 1
        if not flow.waiting:
            del self._flows[flow.key]
            self._ended[flow.key] = flow.start
        if not self._size:
            self._ended.clear()
            self._now = 0.0
