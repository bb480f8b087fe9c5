"""Limit the requests in flight on one server for all workers together.

Each worker counts its requests in a cell of shared memory that the others read. The rules:

- A worker adds up the counts and takes a slot while it holds the server's lock. So the limit holds exactly, and each worker may use every
  slot that is free. A worker writes only its own count.
- Each worker has a part of the limit. While it has queued requests and less than its part, the others take no slot beyond their parts. So a
  worker never waits for more than the end of one borrowed slot.
- A worker that has no use for a free slot wakes another worker that may take it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from upstream.balancing.server import Server
from upstream.cells import Cells


class Peer(NamedTuple):
    """Another worker: its number, its requests in flight on the server, and those that are queued for the model."""

    number: int
    in_flight: Cells
    queued: Cells

    def is_owed(self, part: int) -> bool:
        """Return whether it has queued requests, and less than its part."""
        return self.queued[0] > 0 and self.in_flight[0] < part


class SharedLimit:
    """The limit of one server as one worker sees it.

    ``number``: that of this worker. ``parts``: those of all workers. Reserved slots are in no part, because the queued requests of another
    worker may not be allowed to use them. ``queued``: cell 0 is the number of requests that this worker has queued for the model.
    ``peers``: returns the other workers that have applied the model. ``wake``: lets the worker with this number check for free slots.
    """

    __slots__ = ("_limit", "_lock", "_number", "_peers", "_queued", "_wake", "parts")

    def __init__(
        self,
        limit: int,
        number: int,
        parts: Sequence[int],
        queued: Cells,
        lock: AbstractContextManager[Any],
        peers: Callable[[], Sequence[Peer]],
        wake: Callable[[int], None],
    ) -> None:
        self._limit = limit
        self._number = number
        self.parts = parts
        self._queued = queued
        self._lock = lock
        self._peers = peers
        self._wake = wake

    def allows(self, own: float) -> bool:
        """Return whether this worker may take a slot now. ``own``: its requests in flight."""
        peers = self._peers()
        if own + sum(each.in_flight[0] for each in peers) >= self._limit:
            return False
        return own < self.parts[self._number] or not any(each.is_owed(self.parts[each.number]) for each in peers)

    def take(self, cells: Cells) -> bool:
        """Count a request in this worker's cell, provided that a slot is free. Returns whether it was."""
        with self._lock:
            if not self.allows(cells[0]):
                return False
            cells[0] += 1
            return True

    def offer(self, own: float) -> None:
        """Wake the worker that should have a free slot: among the workers with queued requests, it uses the smallest share of its part.

        No slot is offered that this worker may use for its own queued requests. ``own``: its requests in flight.
        """
        peers = self._peers()
        waiting = [each for each in peers if each.queued[0] > 0]
        if not waiting or own + sum(each.in_flight[0] for each in peers) >= self._limit:
            return
        if self._queued[0] == 0 or not self.allows(own):
            self._wake(min(waiting, key=self._used).number)

    def _used(self, peer: Peer) -> float:
        return peer.in_flight[0] / self.parts[peer.number]


class SharedServer(Server):
    """A server whose limit all workers share. Without a limit it is like any other."""

    shared: SharedLimit | None = None

    def guarantee(self, parts: Sequence[int]) -> None:
        """Guarantee these numbers of slots to the workers, instead of their parts of the limit."""
        if self.shared is not None:
            self.shared.parts = parts

    @property
    def is_shared(self) -> bool:
        """Whether other workers use its slots, too."""
        return self.shared is not None

    @property
    def full(self) -> bool:
        """Whether this worker may send it no further request now."""
        return self.shared is not None and not self.shared.allows(self.in_flight_cells[0])

    @property
    def is_over_limit(self) -> bool:
        """Whether this worker could send it no request even if one of its requests ended: other workers would take the slot."""
        return self.shared is not None and not self.shared.allows(self.in_flight_cells[0] - 1)

    def take_slot(self) -> bool:
        """Take a slot. Returns False if other workers have taken all; the rankings then know it."""
        if self.shared is None or self.shared.take(self.in_flight_cells):
            return True
        self.update_rankings()
        return False

    def start_exchange(self, tier: int = 0) -> None:
        """Count a request as in flight. Its slot was counted when it was taken."""
        if self.shared is None:
            super().start_exchange(tier)
            return
        self.in_flight += 1
        if tier:
            self.count_in_tiers(tier, 1)
        for ranking in self.rankings:
            ranking.update_load(self)

    def finish_exchange(self, tier: int = 0) -> None:
        """Count a request as finished, and offer its slot to the other workers if this worker does not use it."""
        super().finish_exchange(tier)
        self.offer_slot()

    def offer_slot(self) -> None:
        """Offer a free slot to the other workers if this worker does not use it."""
        if self.shared is not None:
            self.shared.offer(self.in_flight_cells[0])
