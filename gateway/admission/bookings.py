"""Bookings: the times at which clients that were refused are to return, and for which their flows have a place in the order.

A booking is a request that does not wait yet. It counts in its flow like a waiting request, so a key gets no more than its share by
booking. The rules: a request of the same flow takes a booking from its time until ``RETURN_GRACE`` later; then it expires. Each flow has at
least as many bookings for its weight as any other before its own are refused, and all together are at most ``most``.

Pure: the clock is given. Times are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from gateway.admission.fair_queue import Flow

RETURN_GRACE = 2.0
"""Seconds that a client may be late when it retries after its Retry-After."""
_OWN = 0.5  # seconds for which only the same request takes a booking
_AT = attrgetter("at")


class Booking(NamedTuple):
    """The time of a booking, and its request: the service that it will probably get, its leaf, its fingerprint, and its deadline."""

    at: float
    service: float
    leaf: Flow[Any]
    fingerprint: int
    deadline: float


class Bookings:
    """The bookings of a queue, in the order of their times."""

    def __init__(self) -> None:
        self._bookings: list[Booking] = []

    def __len__(self) -> int:
        return len(self._bookings)

    def add(self, booking: Booking, most: int) -> Booking | None:
        """Add a booking. Beyond ``most``, remove and return the latest booking of the flow with the most for its weight."""
        insort(self._bookings, booking, key=_AT)
        booking.leaf.booked += 1
        if len(self._bookings) <= most:
            return None
        heaviest = max((each.leaf for each in self._bookings), key=lambda leaf: leaf.booked / leaf.weight)
        number = next(at for at in range(len(self._bookings) - 1, -1, -1) if self._bookings[at].leaf is heaviest)
        return self._remove(number)

    def take(self, leaf: Flow[Any], fingerprint: int, now: float) -> Booking | None:
        """Remove and return the earliest booking of a leaf whose time has come, if a request with this fingerprint may take it.

        A client that returns sends the same request, so another request of the same flow takes its booking only if the client is late.
        """
        if not leaf.booked:
            return None
        due = enumerate(self._bookings[: bisect_right(self._bookings, now, key=_AT)])
        number = next((at for at, each in due if each.leaf is leaf and (each.fingerprint == fingerprint or now - each.at > _OWN)), None)
        return None if number is None else self._remove(number)

    def expire(self, now: float) -> list[Booking]:
        """Remove the bookings whose clients have not returned in time. Return them."""
        number = bisect_left(self._bookings, now - RETURN_GRACE, key=_AT)
        return [self._remove(0) for _ in range(number)]

    def _remove(self, number: int) -> Booking:
        booking = self._bookings.pop(number)
        booking.leaf.booked -= 1
        return booking

    def between(self, start: float, end: float) -> list[Booking]:
        """Return the bookings from ``start`` to ``end``."""
        return self._bookings[bisect_left(self._bookings, start, key=_AT) : bisect_right(self._bookings, end, key=_AT)]


def service_of(bookings: Iterable[Booking]) -> Mapping[Flow[Any], float]:
    """Return the service of bookings for each flow that they are of: the leaf and those above it."""
    found: dict[Flow[Any], float] = defaultdict(float)
    for booking in bookings:
        node: Flow[Any] | None = booking.leaf
        while node is not None:
            found[node] += booking.service
            node = node.parent
    return found
