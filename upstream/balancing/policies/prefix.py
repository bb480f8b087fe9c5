"""``balance: prefix``: requests with the same prefix go to the server that has this prefix cached.

A request has an affinity key, a number that requests with the same prefix share (gateway/prompts/prefix.py). Keys are mapped to ``SLOTS``.
For each slot every server has a score, a hash of its name and the slot, and the server with the highest score gets the request:
rendezvous hashing with bounded load. The rules:

* Stable: a score depends on name, weight and slot only. When a server is removed, only the keys in its slots move. A new server gets only
the slots in which it ranks first. All workers compute the same assignment, also after a restart.
* Weighted: with ``-weight / ln(hash)`` as the score, a server wins a share of the slots that is its share of the weights (weighted
  rendezvous hashing, Schindelhauer and Schomaker 2005). A hash ring would need points in proportion to the weights.
* Bounded: a server that has more than ``FACTOR`` times its share of the requests in flight is skipped, and the slot's next server gets the
  request (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2016). The order differs from slot to slot, so the
  overflow of one server spreads over all others.

The order of a slot is computed when the slot is first used. After that a choice examines one server, or a few. Requests in flight are
counted in this worker: with several workers, each keeps the bound for its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from heapq import nlargest

from upstream.balancing.policies.policy import C, Candidates, Policy, RequestFacts

SLOTS = 4096
"""With 64 servers, each wins 64 slots, plus or minus 8. A hash ring with as many points per server is about as even."""
CHOICES = 8
"""Servers stored for each slot. If all of them are busy or out of rotation, the least busy server gets the request."""
FACTOR = 1.25
FREE = 4
"""Requests in flight below which a server is never skipped: vLLM processes so few requests together in nearly the time of one."""


class Prefix(Policy[C]):
    """Choose the same server for the same affinity key, and the least busy server for a request without a key."""

    description = "the server that has the [prefix of the prompt](prefix-cache.md) cached, unless it is too busy; otherwise as `least_busy`"
    requires = frozenset({"affinity_key"})
    uses_idle_pool_evenly = True

    def __init__(self, servers: Sequence[C], settings: object = None) -> None:
        super().__init__(servers, settings)
        self._servers = tuple(servers)
        self._orders: dict[int, tuple[C, ...]] = {}

    def order(self, affinity_key: int) -> tuple[C, ...]:
        """Return the servers for a key, the preferred one first; at most ``CHOICES``."""
        slot = affinity_key % SLOTS
        order = self._orders.get(slot)
        if order is None:
            order = self._orders[slot] = tuple(nlargest(CHOICES, self._servers, key=lambda server: score(server.name, server.weight, slot)))
        return order

    def choose(self, candidates: Candidates[C], request: RequestFacts) -> C:
        """Return the first server in the key's order that is a candidate and not too busy."""
        if request.affinity_key is not None:
            limit: float | None = None
            for server in self.order(request.affinity_key):
                if server not in candidates:
                    continue
                if server.in_flight < FREE:
                    return server
                if limit is None:
                    # The requests in flight that a server may have for each unit of weight, the request to place included.
                    members = candidates.members
                    limit = FACTOR * (sum(each.in_flight for each in members) + 1) / sum(each.weight for each in members)
                if server.in_flight < math.ceil(limit * server.weight):
                    return server
        return candidates.least_busy()


def score(name: str, weight: float, slot: int) -> float:
    """Return the score of a server for a slot; the highest score wins."""
    digest = blake2b(b"%d %b" % (slot, name.encode()), digest_size=8).digest()
    return -weight / math.log((int.from_bytes(digest) + 1) / (2**64 + 2))
