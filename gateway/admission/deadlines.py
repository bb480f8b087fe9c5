"""Admit a request to a queue only if it can make its deadline, and give the others a time at which they can.

The rules:

- A request waits only if its predicted wait, and then the usual time to its first token, end before its deadline. Bookings of the time
  until then count as if their requests waited already: a later request takes no booked place.
- A request that is refused gets a time to return, and a booking of it: a little after the time at which it would be dispatched if it
  waited. Around that time, no more is booked than can be served within half of the wait that the deadline allows.
- A request that returns in its time, to any worker, takes its booking and waits, whatever is predicted. It comes before the later requests
  of its flow, and before those of other flows of its class.

Pure: the clock is given. Times are in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import ceil
from typing import Any

from gateway.admission.bookings import Booking, Bookings, service_of
from gateway.admission.fair_queue import FairQueue, Flow
from gateway.admission.prediction import FirstTokenTime, ServiceRate, service_before
from gateway.admission.shared_bookings import SharedBookings

LONGEST_RETRY = 60
"""Seconds. Clients obey a Retry-After of at most a minute; a client that would have to wait longer gets no booking."""
_CAUTION = 1.25
"""The time of a booking, in predicted waits: the queue is then seldom longer than predicted."""
_BOOKED = 0.5
"""The part of the wait that deadlines allow that bookings may take. The rest is for waits that were predicted too short."""
_TTFT = re.compile(rb"(\d{1,6}(?:\.\d{1,6})?)(ms|s|)")


def ttft_of(header: bytes) -> float | None:
    """Return the seconds of a client's objective, such as ``2s``, ``500ms`` or ``2``; None if the header has no positive duration."""
    found = _TTFT.fullmatch(header)
    return None if found is None else float(found[1]) / (1000 if found[2] == b"ms" else 1) or None


class DeadlinePlan:
    """The knowledge of a queue about the time to come: the rate of service, the time to a first token, and the bookings."""

    def __init__(self, queue: FairQueue[Any], now: float, shared: SharedBookings) -> None:
        self._queue = queue
        self.rate = ServiceRate(now)
        self.first_token = FirstTokenTime()
        self.bookings = Bookings(shared)

    def wait(self, leaf: Flow[Any], own: float, until: float, now: float) -> float | None:
        """Predict the wait of a new request of a leaf, with the bookings until a time; None if it is unknown.

        ``own``: the service of the waiting requests of the leaf that come before it.
        """
        booked = service_of(self.bookings.between(0.0, until))
        before = service_before(leaf, own + booked.get(leaf, 0.0), booked)
        return self.rate.seconds_for(before, now, waiting=len(self._queue) > 0)

    def too_long_wait(self, leaf: Flow[Any], own: float, latest: float, now: float) -> float | None:
        """Return the predicted wait of a new request if it ends after ``latest``, so that it is refused at once; None otherwise."""
        wait = self.wait(leaf, own, latest, now)
        return wait if wait is not None and now + wait > latest else None

    def add_booking(self, request: Booking, slack: float, most: int, now: float) -> tuple[int, bool] | None:
        """Book a place for a request. Return the whole seconds until it, and whether it is booked; None if no wait can be predicted.

        ``slack``: the wait that the deadline allows. ``most``: the bookings of the queue.
        """
        leaf, until = request.leaf, now + LONGEST_RETRY
        wait = self.wait(leaf, leaf.backlog, until, now)
        if wait is None:
            return None
        seconds = max(ceil(wait * _CAUTION), 1)
        while seconds <= LONGEST_RETRY and self._is_crowded(leaf, now + seconds, slack, now):
            seconds += 1
        if seconds > LONGEST_RETRY:
            return LONGEST_RETRY, False
        booking = request._replace(at=self.bookings.free_time(now + seconds))
        return seconds, self.bookings.add(booking, most) is not booking

    def _is_crowded(self, leaf: Flow[Any], at: float, slack: float, now: float) -> bool:
        """Return whether the bookings just before or after a time take too much of ``slack`` for one more."""
        nearby = self.bookings.between(at - slack, at), self.bookings.between(at, at + slack)
        return any(self._seconds_for(leaf, bookings, now) > slack * _BOOKED for bookings in nearby if bookings)

    def _seconds_for(self, leaf: Flow[Any], bookings: Iterable[Booking], now: float) -> float:
        booked = service_of(bookings)
        before = service_before(leaf, booked.get(leaf, 0.0), booked, waiting=False)
        return self.rate.seconds_for(before, now, waiting=False) or 0.0
