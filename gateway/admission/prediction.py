"""Predict how long a request will wait for capacity, and when its first token follows.

The wait is the service that is dispatched before the request, divided by the measured rate of service. That is the service of the earlier
requests of its flow, and of each competing flow as much as the order of ``fair_queue`` serves before it: a flow with a debt waits longer,
and a long queue of another key counts only up to its share. Both service and rate are estimates made at the arrival of requests, so an
error that all estimates have in common cancels out.

It is not a bound. It does not foresee later requests of other flows, such as those of a strict class, nor that servers become faster or
slower. So the queue also refuses a request whose deadline passes while it waits. The rule: what was measured long ago is unknown, and an
unknown wait refuses no request; otherwise no request would be left to measure.

Pure: the clock is given. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf
from typing import Any

from gateway.admission.fair_queue import Flow

_MEMORY = 10.0  # seconds of dispatches that the rate averages
_STALE = 30.0  # seconds after which a measurement is unknown
_RETAINED = 0.97  # weight of the earlier streams against the next one
_LEARNING = 0.1  # weight of a deviation against the earlier ones


class ServiceRate:
    """The service that servers at capacity take from a queue in a second: a moving mean over the times between two dispatches."""

    def __init__(self, now: float) -> None:
        self._service = self._seconds = self._dispatches = 0.0
        self._last, self._measured = now, -inf

    def start(self, now: float) -> None:
        """Start measuring: the queue is no longer empty."""
        self._last = now

    def record_dispatch(self, service: float, now: float) -> None:
        """Record that a request was dispatched which will probably get this service."""
        seconds = now - self._last
        retained = exp(-seconds / _MEMORY)
        self._service = self._service * retained + service
        self._seconds = self._seconds * retained + seconds
        self._dispatches = self._dispatches * retained + 1.0
        self._last = self._measured = now

    def seconds_for(self, service: float, now: float, *, waiting: bool) -> float | None:
        """Return the time until the request after this service is dispatched; None if it is unknown.

        ``waiting``: whether the queue has waiting requests, so that the time since the last dispatch counts if it is unusually long.
        """
        if now - self._measured > _STALE or not self._service:
            return None
        interval = self._seconds / self._dispatches
        late = max(now - self._last - interval, 0.0) if waiting else 0.0
        return service * (self._seconds + late) / self._service + interval


class FirstTokenTime:
    """The time from the dispatch of a request to its first token: a line over the size of bodies, fitted to the recent streams."""

    def __init__(self) -> None:
        self._count = self._size = self._seconds = self._size_size = self._size_seconds = 0.0
        self._deviation = 0.0
        self._measured = -inf

    def learn(self, seconds: float, size: int, now: float) -> None:
        """Learn from a stream whose request had a body of ``size`` bytes."""
        if self._count:
            self._deviation += _LEARNING * (abs(seconds - self._mean(size)) - self._deviation)
        sums = (self._count, self._size, self._seconds, self._size_size, self._size_seconds)
        added = (1.0, size, seconds, size * size, size * seconds)
        self._count, self._size, self._seconds, self._size_size, self._size_seconds = (
            _RETAINED * each + more for each, more in zip(sums, added, strict=True)
        )
        self._measured = now

    def usual(self, size: int, now: float) -> float:
        """Return the time that is usual for a body of ``size`` bytes, and twice the mean deviation from it; 0 if it is unknown."""
        if now - self._measured > _STALE:
            return 0.0
        return max(self._mean(size), 0.0) + 2.0 * self._deviation

    def _mean(self, size: int) -> float:
        size_mean, seconds_mean = self._size / self._count, self._seconds / self._count
        variance = self._size_size / self._count - size_mean * size_mean
        covariance = self._size_seconds / self._count - size_mean * seconds_mean
        slope = max(covariance / variance, 0.0) if variance > 1.0 else 0.0
        return seconds_mean + slope * (size - size_mean)


def service_before(leaf: Flow[Any], own: float, booked: Mapping[Flow[Any], float], *, waiting: bool = True) -> float:
    """Return the service that is dispatched before a new request of a leaf.

    ``own``: that of the requests of the leaf that come before it. ``booked``: the service of bookings of each flow, which counts as if
    their requests were waiting, and before requests of other flows. Without ``waiting``, the requests that wait do not count.
    """
    before, node = own, leaf
    while (parent := node.parent) is not None:
        reached = node.start_tag + before / node.weight
        for other in parent.children.values():
            if other is node or other.rank > node.rank:
                continue
            promised = booked.get(other, 0.0)
            service = promised + (other.backlog if waiting else 0.0)
            if service > 0.0:
                lag = (reached - other.start_tag) * other.weight + promised
                before += service if other.rank < node.rank else min(service, max(lag, 0.0))
        node = parent
    return before
