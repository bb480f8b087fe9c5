"""Requests that begin alike go to the server that has their beginning cached: rendezvous hashing with bounded load.

A request comes with a hint, a number that is the same for all that share a beginning (gateway/proxy/prefix.py makes it).
Hints fall into ``SLOTS``; for each slot every server has a score, a hash of its name and the slot, and the best
one is asked first. The rules:

* Stable: a score depends on nothing but name, weight and slot, so a server that goes away moves its own slots alone, one
  that comes takes only those that are its own now, and all workers, and a worker that was restarted, agree.
* Weighted: with ``-weight / ln(hash)`` as score a server is first in a share of the slots that is its share of the weights
  (weighted rendezvous hashing, Schindelhauer and Schomaker 2005). A ring needs points in proportion to the weights for that.
* Bounded: a server with more than ``FACTOR`` times its share of what is in flight is passed over and the slot's next one asked
  (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2016). Each slot has an order of its own, so what one busy
  server sends on is spread over all others.

An order is worked out when its slot is first asked for; after that a choice costs a look at one server, or few. In flight
is what this worker sees: with several workers each keeps the bound for its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from hashlib import blake2b
from heapq import nlargest
from typing import Generic, Protocol, TypeVar

SLOTS = 4096
"""A server of 64 has 64 of them, give or take 8: about the evenness of a ring with as many points a server."""
CHOICES = 8
"""Servers of a slot's order that are remembered; when all of them are too busy or away, the caller's own choice stands."""
FACTOR = 1.25
FREE = 4
"""Requests in flight up to which a server is never too busy: vLLM works on so few at once in nearly the time of one."""


class Member(Protocol):
    """What is known of a server here."""

    in_flight: int

    @property
    def name(self) -> str:
        """The same for as long as its cache is."""

    @property
    def weight(self) -> float:
        """Its share next to the others."""


M = TypeVar("M", bound=Member)


class Affinity(Generic[M]):
    """The orders in which one pool's servers are asked."""

    def __init__(self, servers: Sequence[M]) -> None:
        self._servers = tuple(servers)
        self._orders: dict[int, tuple[M, ...]] = {}

    def order(self, hint: int) -> tuple[M, ...]:
        """The servers for this hint, the best first; at most CHOICES."""
        slot = hint % SLOTS
        found = self._orders.get(slot)
        if found is None:
            found = self._orders[slot] = tuple(nlargest(CHOICES, self._servers, key=lambda server: score(server.name, server.weight, slot)))
        return found

    def choose(self, among: Collection[M], hint: int) -> M | None:
        """The first in the hint's order that is ``among`` those that can be asked and not too busy; None if there is no such."""
        limit: float | None = None
        for server in self.order(hint):
            if server not in among:
                continue
            if server.in_flight < FREE:
                return server
            if limit is None:
                limit = limit_per_weight(among)
            if server.in_flight < math.ceil(limit * server.weight):
                return server
        return None


def limit_per_weight(servers: Collection[Member]) -> float:
    """How much each unit of weight may have in flight, the request that is to be placed among it."""
    return FACTOR * (sum(server.in_flight for server in servers) + 1) / sum(server.weight for server in servers)


def score(name: str, weight: float, slot: int) -> float:
    """Larger is better; for each slot another number, for each server another row of numbers."""
    digest = blake2b(b"%d %b" % (slot, name.encode()), digest_size=8).digest()
    return -weight / math.log((int.from_bytes(digest) + 1) / (2**64 + 2))
