"""Keys whose requests wait for a model that serves only others, from the workers' counters. Pure.

The rule: only keys that wait are stored, so memory is bounded by the queues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.telemetry.metrics import Series

FAMILIES_READ = ("queue_waiting_requests", "queue_requests_total", "queue_service_in_flight")
"""The families of the workers' counters that are read."""
UNSERVED = 120.0
"""Seconds without service after which a key counts, as in the alert of Prometheus."""
_PAUSE = 60.0  # seconds without a waiting request, for a client that tries again
_SERVICE = 1.0  # the service of the smallest request; less is a rounding error of the counters


@dataclass(frozen=True, slots=True)
class Unserved:
    """A key in a class that waits. ``since``: when it was first seen with ``dispatched`` requests, and ``of_model`` those of the model."""

    model: str
    class_name: str
    team: str
    key: str
    waiting: float
    dispatched: float
    of_model: float
    since: float
    seen: float


class Starvation:
    """The keys that wait without service."""

    def __init__(self) -> None:
        self._unserved: dict[tuple[str, ...], Unserved] = {}

    def update(self, at: float, series: Mapping[Series, Sequence[float]]) -> list[Unserved]:
        """Read the counters, and return the keys that got no service for ``UNSERVED`` seconds while others of the model did."""
        of_model: defaultdict[str, float] = defaultdict(float)
        for each, values in series.items():
            if each.family == "queue_requests_total":
                of_model[each.labels[0]] += values[0]
        self._unserved = {(one.model, one.class_name, one.team, one.key): one for one in self._found(at, series, of_model)}
        return [one for one in self._unserved.values() if at - one.since >= UNSERVED and of_model[one.model] > one.of_model]

    def _found(self, at: float, series: Mapping[Series, Sequence[float]], of_model: Mapping[str, float]) -> Iterator[Unserved]:
        """Yield the keys that wait now or waited a moment ago, and have nothing in flight."""
        waiting = {each.labels: values[0] for each, values in series.items() if each.family == "queue_waiting_requests" and values[0]}
        for labels in waiting.keys() | self._unserved.keys():
            dispatched, in_flight = (series.get(Series(name, labels), (0.0,))[0] for name in FAMILIES_READ[1:])
            known = self._unserved.get(labels)
            if in_flight >= _SERVICE:
                continue
            if known is None or known.dispatched != dispatched:
                if labels in waiting:
                    model, class_name, team, key = labels
                    served = of_model.get(model, 0.0)
                    yield Unserved(model, class_name, team, key, waiting[labels], dispatched, of_model=served, since=at, seen=at)
            elif labels in waiting:
                yield replace(known, waiting=waiting[labels], seen=at)
            elif at - known.seen < _PAUSE:
                yield known
