"""Bookings: the times at which clients that were refused are to return, and for which their flows have a place in the order.

A booking is a request that does not wait yet. It counts in its flow like a waiting request, so a key gets no more than its share by
booking. The rules: a request of the same flow takes a booking from its time until ``RETURN_GRACE`` later; then it expires. Each flow has at
least as many bookings for its weight as any other before its own are refused, and all together are at most ``most``. The bookings of the
other workers (``shared_bookings``) are taken in the same way.

Pure: the clock is given. Times are in seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf, nextafter
from operator import attrgetter
from typing import Any, NamedTuple

from gateway.admission.fair_queue import Flow
from gateway.admission.shared_bookings import SharedBookings

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

    def __init__(self, shared: SharedBookings) -> None:
        self._bookings: list[Booking] = []
        self._shared = shared

    def __len__(self) -> int:
        return len(self._bookings)

    @property
    def exist(self) -> bool:
        """Whether any worker has bookings."""
        return bool(self._bookings) or self._shared.exist_elsewhere

    def free_time(self, at: float) -> float:
        """Return a time that no other booking has: this one, or just after it."""
        while self._shared.has(at):
            at = nextafter(at, inf)
        return at

    def add(self, booking: Booking, most: int) -> Booking | None:
        """Add a booking, of a free time. Beyond ``most``, remove and return the latest booking of the flow with the most for its weight."""
        insort(self._bookings, booking, key=_AT)
        booking.leaf.booked += 1
        self._shared.publish(booking.leaf, booking.fingerprint, booking.at, booking.deadline)
        if len(self._bookings) <= min(most, self._shared.most):
            return None
        heaviest = max((each.leaf for each in self._bookings), key=lambda leaf: leaf.booked / leaf.weight)
        number = next(at for at in range(len(self._bookings) - 1, -1, -1) if self._bookings[at].leaf is heaviest)
        return self._remove(number)

    def take(self, leaf: Flow[Any], fingerprint: int, now: float) -> Booking | None:
        """Remove and return the earliest booking of a leaf whose time has come, if a request with this fingerprint may take it.

        A client that returns sends the same request, so another request of the same flow takes its booking only if the client is late. A
        client that was refused by another worker takes its booking there.
        """
        self.remove_honored()
        due = self._bookings[: bisect_right(self._bookings, now, key=_AT)] if leaf.booked else []
        of_leaf = [(number, each) for number, each in enumerate(due) if each.leaf is leaf]
        own = next((number for number, each in of_leaf if each.fingerprint == fingerprint), None)
        if own is None and (found := self._shared.take(leaf, fingerprint, now, RETURN_GRACE)) is not None:
            return Booking(found[0], 0.0, leaf, fingerprint, found[1])
        if own is None:
            own = next((number for number, each in of_leaf if now - each.at > _OWN), None)
        return None if own is None else self._remove(own)

    def remove_honored(self) -> None:
        """Remove the bookings that other workers have honored."""
        for at in self._shared.honored():
            self._remove(bisect_left(self._bookings, at, key=_AT))

    def expire(self, now: float) -> list[Booking]:
        """Remove the bookings whose clients have not returned in time. Return them."""
        number = bisect_left(self._bookings, now - RETURN_GRACE, key=_AT)
        return [self._remove(0) for _ in range(number)]

    def _remove(self, number: int) -> Booking:
        booking = self._bookings.pop(number)
        booking.leaf.booked -= 1
        self._shared.withdraw(booking.at)
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
