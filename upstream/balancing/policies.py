"""Which server takes a request: pure functions of the servers and a turn number.

A policy is one function ``(servers, turn) -> server``; ``POLICIES`` is the list of what the configuration may
name. ``servers`` is never empty; ``turn`` grows by one with every choice of its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may know of a server."""

    @property
    def load(self) -> float:
        """Requests in flight, divided by the server's weight."""


C = TypeVar("C", bound=Candidate)
Policy = Callable[[Sequence[C], int], C]


def least_busy(servers: Sequence[C], turn: int) -> C:
    """The one with the smallest load; among equals they take turns, so an idle pool is used evenly."""
    first = turn % len(servers)
    best = servers[first]
    for candidate in (*servers[first + 1 :], *servers[:first]):
        if candidate.load < best.load:
            best = candidate
    return best


def round_robin(servers: Sequence[C], turn: int) -> C:
    """Each in turn."""
    return servers[turn % len(servers)]


POLICIES: Mapping[str, Policy[Candidate]] = MappingProxyType({"least_busy": least_busy, "round_robin": round_robin, "prefix": least_busy})
"""By the name of a balance. ``prefix`` is upstream/balancing/affinity.py's; this is for requests of which it knows no better server."""
