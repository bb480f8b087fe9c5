"""Share the bookings of a model's queue with the other workers: a client may return to any of them.

Each worker publishes its bookings in cells of shared memory, and those of other workers that it has honored. The rules:

- A worker writes only its own cells. It removes its bookings that others have honored when it checks them, at the latest at its next tick.
- A request takes a booking of another worker only with the same flow and the same fingerprint.
- A booking is known by its time, which is unique. Two requests that arrive in two workers in the same moment may both take it: one request
  more is admitted, never one less.

The cells: the number of bookings; the number of bookings of others that were honored; the times of the latest ``_HONORED`` of these; and
the flows, the times and the deadlines of its bookings. The bookings have no gaps, so only the used part is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from gateway.admission.fair_queue import Flow
from gateway.telemetry.shared_counters import SharedCells

_HONORED = 256
_TIMES = 2
_FLOWS = _TIMES + _HONORED


class SharedBookings:
    """The bookings of one queue in all workers.

    ``own``: the cells of this worker. ``peers``: returns those of the others, which may not exist yet.
    """

    def __init__(self, own: SharedCells, peers: Callable[[], Sequence[SharedCells | None]]) -> None:
        self._own = own
        self._peers = peers
        self._rows: dict[float, int] = {}
        """The row of each booking of this worker, by its time."""
        rows = (len(own) - _FLOWS) // 3
        self._at, self._deadlines = _FLOWS + rows, _FLOWS + 2 * rows
        self.most = rows - 1
        """The bookings of this worker that fit; and one more for a moment."""
        self._seen: dict[int, int] = {}
        """The number of honored bookings of each other worker that were read."""
        own[0] = 0.0

    @property
    def exist_elsewhere(self) -> bool:
        """Whether another worker has bookings."""
        return any(peer is not None and peer[0] for peer in self._peers())

    def has(self, at: float) -> bool:
        """Return whether this worker has a booking of this time."""
        return at in self._rows

    def publish(self, leaf: Flow[Any], fingerprint: int, at: float, deadline: float) -> None:
        """Publish a booking of this worker."""
        row = len(self._rows)
        for column, value in ((_FLOWS, _number_of(leaf, fingerprint)), (self._at, at), (self._deadlines, deadline)):
            self._own[column + row] = value
        self._rows[at] = row
        self._own[0] = row + 1

    def withdraw(self, at: float) -> None:
        """Remove a booking. The last one gets its row, and can be found meanwhile."""
        row, last = self._rows.pop(at), len(self._rows)
        if row != last:
            self._rows[self._own[self._at + last]] = row
            for column in (_FLOWS, self._at, self._deadlines):
                self._own[column + row] = self._own[column + last]
        self._own[0] = last

    def honored(self) -> Iterator[float]:
        """Yield the times of the bookings of this worker that others have honored since the last call."""
        for number, peer in enumerate(self._peers()):
            if peer is None:
                continue
            count = int(peer[1])
            for each in range(max(self._seen.get(number, 0), count - _HONORED), count):
                if (at := peer[_TIMES + each % _HONORED]) in self._rows:
                    yield at
            self._seen[number] = count

    def take(self, leaf: Flow[Any], fingerprint: int, now: float, grace: float) -> tuple[float, float] | None:
        """Honor a booking of another worker that a request may take at this time. Return its time and its deadline; None without one."""
        flow = 0.0
        for peer in self._peers():
            if peer is None or not (count := int(peer[0])):
                continue
            flow = flow or _number_of(leaf, fingerprint)
            for row, each in enumerate(peer[_FLOWS : _FLOWS + count].tolist()):
                if each != flow or not now - grace <= (at := peer[self._at + row]) <= now or self._is_honored(at):
                    continue
                deadline = peer[self._deadlines + row]
                if peer[_FLOWS + row] == flow:  # otherwise its worker has just moved another booking there
                    self._honor(at)
                    return at, deadline
        return None

    def _is_honored(self, at: float) -> bool:
        return any(each is not None and at in each[_TIMES:_FLOWS].tolist() for each in (self._own, *self._peers()))

    def _honor(self, at: float) -> None:
        count = int(self._own[1])
        self._own[_TIMES + count % _HONORED] = at
        self._own[1] = count + 1


def _number_of(leaf: Flow[Any], fingerprint: int) -> float:
    """Return a number for a flow and a fingerprint: the same in all workers, and never 0."""
    names, node = [str(fingerprint)], leaf
    while node.parent is not None:
        names.append(node.name)
        node = node.parent
    return float(int.from_bytes(blake2b("\0".join(names).encode(), digest_size=6).digest()) + 1)
