"""In which order those go on that wait for the same thing: start-time fair queueing (Goyal, Vin and Cheng, 1996), by requests.

Who waits belongs to a flow with a weight. The rules: flows that keep waiting go on in proportion to their weights, to within one
request each, however many wait in each of them; within a flow the order is that of arrival; who leaves costs his flow nothing;
when there is no place for one more, the flow that has most for its weight gives one up, but never its last.

Pure: no clock, no I/O. What is done costs time in proportion to the number of flows that wait, not of those who wait.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _Flow(Generic[T]):
    """Those of one flow, in order, with the time since when each waits. ``start`` is when the first one's turn begins, in virtual time."""

    __slots__ = ("key", "start", "waiting", "weight")

    def __init__(self, key: str, weight: float, start: float) -> None:
        self.key = key
        self.weight = weight
        self.start = start
        self.waiting: dict[T, float] = {}

    def add(self, item: T, since: float) -> None:
        latest = next(reversed(self.waiting.values()), since)
        self.waiting[item] = since
        if since < latest:  # it had had its turn before, to no avail
            self.waiting = dict(sorted(self.waiting.items(), key=lambda pair: pair[1]))

    def share(self) -> float:
        """How many wait for their weight."""
        return len(self.waiting) / self.weight


class FairQueue(Generic[T]):
    """Those who wait. Virtual time begins anew whenever nobody does."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._ended: dict[str, float] = {}
        """The virtual time at which the last turn of a flow ended in which nobody waits now."""
        self._now = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """Everybody, in no order between flows."""
        return (item for flow in self._flows.values() for item in flow.waiting)

    @property
    def oldest(self) -> float | None:
        """Since when the one waits who came first."""
        return min((next(iter(flow.waiting.values())) for flow in self._flows.values()), default=None)

    def put(self, item: T, key: str, weight: float, since: float) -> None:
        """Have one more wait in the flow of a key, behind those of it who came before."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(key, weight, max(self._now, self._ended.pop(key, 0.0)))
        flow.weight = weight
        flow.add(item, since)
        self._size += 1

    def pop(self) -> T:
        """Whose turn it is. Raises ValueError when nobody waits."""
        flow = min(self._flows.values(), key=lambda flow: flow.start)
        item = next(iter(flow.waiting))
        self._now = flow.start
        flow.start += 1 / flow.weight
        self._remove_from(flow, item)
        return item

    def remove(self, item: T, key: str) -> None:
        """One leaves without having had his turn. Raises KeyError for one who does not wait."""
        self._remove_from(self._flows[key], item)

    def displaced_by(self, key: str, weight: float) -> T | None:
        """Who would have to leave for one more of this flow, when there is no place: None when that one has to.

        It is the latest of the flow that has most for its weight; a flow in which nobody waits gets its first place from any
        that has two.
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
