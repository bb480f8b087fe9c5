"""Count what each holder of limits has used, in memory that all workers of a gateway share.

Control creates an anonymous memory file, which the workers inherit and write. The rules: a process that reads in order to write
holds the file lock, which the kernel releases if the process dies. Requests in flight are counted separately for each worker, so
the successor of a worker that died starts with none. Counts are found by the name of their holder, so they survive a reload and a
worker.

A single worker is the only writer and takes no lock, because its passes do not interrupt each other. Control announces its rare writes
with a number. The worker takes the lock for each pass as long as a number is announced, and acknowledges it between two passes. Control
writes after that, or at once if no worker has attached to the memory yet.

Layout, little-endian: u64 workers, u64 bytes of records, three float64: the announced number (0: none), the acknowledged number, whether
a worker has attached; then the records: the SHA-256 of a name (32 bytes), u32 cells, u32 whether it is a holder, and the cells as
float64. The record of a holder has its counts (see ``decision``), and for each worker a cell of what it has in flight. Each of its rolling
windows has a separate record (see ``windows``), named after the holder and the window.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from threading import Lock
from typing import Any

from gateway.limits import decision, sessions, windows
from gateway.limits.decision import REQUESTS, SIZE, TOKENS, Amounts, Holder
from gateway.limits.states import HolderRates
from gateway.limits.windows import RING_CELLS, SPENT, USED, BudgetState, Capacity, ExceededLimit, Moment, Window, session_window, windows_of
from gateway.snapshot.snapshot import Budget, Limits
from gateway.system.file_lock import FileLock

_CAPACITY = 128 * 1024 * 1024  # bytes of address space; the file is sparse, so only what is written takes memory
NO_LIMITS = Limits()
_HEAD = struct.Struct("<QQ3d")
_MARKS = struct.Struct("<QQ")  # the first two fields
_ANNOUNCED, _ACKNOWLEDGED, _ATTACHED = 2, 3, 4  # cells of the other fields
_RECORD = struct.Struct("<32sII")
_CELL = 8  # bytes of a float64


class BucketsFullError(Exception):
    """The memory has no capacity for another record."""


class CountsMovedError(Exception):
    """The counts of an end user belong to another end user now."""


class Buckets:
    """The shared counts as one worker sees them. ``fd`` is inherited by child processes; -1: not shared."""

    def __init__(self, memory: mmap.mmap, fd: int = -1, worker: int | None = 0) -> None:
        self.fd = fd
        self._map = memory
        self.cells = memoryview(memory).cast("d")
        self.workers: int = _MARKS.unpack_from(self._map)[0]
        self._is_only_writer = self.workers == 1 and worker is not None
        self._worker = worker or 0
        self._holders: list[int] = []
        self._offsets: dict[bytes, int] = {}
        self._read = 0  # bytes of the records that are indexed
        self._announced = 0
        self._waits_for_worker = False
        self._lock = Lock() if fd < 0 else FileLock(fd)
        with self._lock:
            self._find_new_records()
            if worker is not None:
                self.cells[_ATTACHED] = 1.0
                for offset in self._holders:
                    self.cells[offset + SIZE + worker] = 0.0

    @classmethod
    def private(cls) -> Buckets:
        """Create counts for a single worker."""
        memory = mmap.mmap(-1, _CAPACITY)
        _MARKS.pack_into(memory, 0, 1, 0)
        return cls(memory)

    @classmethod
    def create(cls, name: str, workers: int) -> Buckets:
        """Create an empty file for a number of workers, as control sees it."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, _CAPACITY)
        os.pwrite(fd, _MARKS.pack(workers, 0), 0)
        return cls(mmap.mmap(fd, _CAPACITY), fd, None)

    @classmethod
    def inherited(cls, fd: int, worker: int) -> Buckets:
        """Map the file of another process for this worker, which has nothing in flight yet."""
        return cls(mmap.mmap(fd, _CAPACITY), fd, worker)

    def close(self) -> None:
        self.cells.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)

    # The lock

    def exclusive(self) -> AbstractContextManager[Any]:
        """Return the lock, or nothing to hold if no other process may write at the moment."""
        return _UNLOCKED if self._is_only_writer and not self.cells[_ANNOUNCED] else self._lock

    def tick(self) -> None:
        """Acknowledge that control has announced writes. A worker calls it a few times a second."""
        if self.cells[_ACKNOWLEDGED] != self.cells[_ANNOUNCED]:
            with self._lock:  # after it, each pass of this worker takes the lock
                self.cells[_ACKNOWLEDGED] = self.cells[_ANNOUNCED]

    def announce_writes(self) -> None:
        """Announce that control will write. It writes once ``may_write`` is true, and calls ``end_writes`` afterwards."""
        self._announced += 1
        with self._lock:  # a worker that attaches later sees the number
            self.cells[_ANNOUNCED] = self._announced
            self._waits_for_worker = self.workers == 1 and self.cells[_ATTACHED] != 0.0

    @property
    def may_write(self) -> bool:
        """Whether control may write: a worker that writes as well takes the lock."""
        return not self._waits_for_worker or self.cells[_ACKNOWLEDGED] == self._announced

    def end_writes(self) -> None:
        """Withdraw the announcement."""
        with self._lock:
            self.cells[_ANNOUNCED] = 0.0

    # Holders

    def holder(self, name: str, limits: Limits, part: float = 1.0) -> Holder:
        """Return a holder; its counts are created for the first request, in a part of the memory. Raises BucketsFullError."""
        with self.exclusive():
            self._find_new_records()
            offset = self._record(name, SIZE + self.workers, part, is_holder=True)
            rings = {each.window: self._record(_ring(name, each.window), RING_CELLS, part) for each in limits.budgets if each.seconds}
        return Holder.placed(name, limits, offset, rings)

    def session(self, owner: str, budget: Budget, name: str, wall: float) -> tuple[Holder, bool]:
        """Return the holder of a session of an owner, and whether another session was forgotten for it (see ``sessions``).

        Raises BucketsFullError if the memory has no capacity for the table.
        """
        with self.exclusive():
            self._find_new_records()
            shared = self._record("sessions", SIZE + self.workers, is_holder=True)  # for rates, which sessions do not limit
            table = self._record("sessions\n", sessions.CELLS)
            entry = sessions.find_entry(self.cells, table, owner, name, wall)
        window = session_window(budget, entry.number, entry.offset)
        return Holder(f"{owner} session {name}", NO_LIMITS, shared, 0, (window,)), entry.evicted

    def _find_new_records(self) -> None:
        """Index the records that other workers have added."""
        _, used = _MARKS.unpack_from(self._map)
        while self._read < used:
            start = _HEAD.size + self._read
            digest, cells, is_holder = _RECORD.unpack_from(self._map, start)
            self._index(digest, start, cells, is_holder)

    def _index(self, digest: bytes, start: int, cells: int, is_holder: bool) -> int:
        offset = self._offsets[digest] = (start + _RECORD.size) // _CELL
        self._read += _RECORD.size + _CELL * cells
        if is_holder:
            self._holders.append(offset)
        return offset

    def record(self, name: str, cells: int, part: float = 1.0, *, is_holder: bool = False) -> int:
        """Return the offset of the cells of a record, which is added if there is none of this name. Its caller has ``exclusive``.

        Raises BucketsFullError.
        """
        self._find_new_records()
        return self._record(name, cells, part, is_holder=is_holder)

    def _record(self, name: str, cells: int, part: float = 1.0, *, is_holder: bool = False) -> int:
        """Return the offset of the cells of a record, which is added if there is none of this name. Raises BucketsFullError."""
        digest = _digest(name)
        if (found := self._offsets.get(digest)) is not None:
            return found
        start, size = _HEAD.size + self._read, _RECORD.size + _CELL * cells
        if start + size > len(self._map) * part:
            raise BucketsFullError(f"no capacity for another holder of limits: there are {len(self._holders)}")
        self._map[start : start + size] = _RECORD.pack(digest, cells, is_holder) + bytes(_CELL * cells)
        _MARKS.pack_into(self._map, 0, self.workers, self._read + size)
        return self._index(digest, start, cells, is_holder)

    # Counts

    def add_earlier_use(self, holder: Holder, used: Mapping[tuple[str, int], tuple[int, int]]) -> None:
        """Add what a holder had used before these counts were created: tokens and cost by the name of a window and the period."""
        with self._lock:
            for window in holder.windows:
                for (name, period), (tokens, cost) in used.items():
                    if name == window.name:
                        windows.add_earlier_use(window, self.cells, period, tokens, cost)

    def number_cell(self, holder: Holder) -> int:
        """Return the cell with the number of the end user that a holder counts now (see ``user_table``)."""
        return holder.offset + SIZE + self.workers

    def in_flight(self, holder: Holder) -> float:
        """Return a holder's requests in flight in all workers."""
        return decision.in_flight_of(holder, self.cells, self.workers)

    def full_times(self, holders: Iterable[Holder]) -> list[tuple[Limits, float, float]]:
        """Return for each holder when its buckets of requests and of tokens are full."""
        cells = self.cells
        return [(holder.limits, cells[holder.offset + REQUESTS], cells[holder.offset + TOKENS]) for holder in holders]

    def rates(self, holder: Holder) -> HolderRates:
        """Return the counts of a holder that are not budgets."""
        offset = holder.offset
        return HolderRates(self.cells[offset + REQUESTS], self.cells[offset + TOKENS], int(self.in_flight(holder)))

    def budget_states(self, holder: Holder, at: Moment) -> list[BudgetState]:
        """Return the state of each budget of a holder. It takes no lock, so it may miss what another worker counts at this moment."""
        return windows.budget_states(holder.windows, self.cells, at)

    def hard_capacity(self, holders: Iterable[Holder], at: Moment) -> tuple[Capacity, Capacity]:
        """Return what is left of the hard budgets of these holders, and the whole budgets. It takes no lock."""
        used: list[tuple[Window, float, float]] = []
        cells, periods = self.cells, at.periods
        for holder in holders:
            for window in holder.windows:
                start = window.start
                if cells[start] == periods[window.calendar]:
                    tokens, cost = cells[start + USED], cells[start + SPENT]
                else:
                    tokens, cost = windows.used_in(window, cells, at)
                used.append((window, tokens, cost))
        return windows.hard_capacity(used)

    # For an observer

    def is_counted(self, name: str) -> bool:
        """Return whether a holder has counts, which it gets with its first request."""
        return self.shown_offset(name) is not None

    def shown_offset(self, name: str) -> int | None:
        """Return the offset of a record, None without the record."""
        self._find_new_records()
        return self._offsets.get(_digest(name))

    def shown_states(self, name: str, limits: Limits, at: Moment) -> list[BudgetState]:
        """Return the state of each budget of a holder for an observer, which changes nothing and takes no lock."""
        offset = self.shown_offset(name)
        rings = {each.window: self._offsets.get(_digest(_ring(name, each.window))) for each in limits.budgets if each.seconds}
        if offset is None or None in rings.values():
            return [state for window in windows_of(limits) for state in windows.states_of(window, 0, 0, 0.0)]
        placed = Holder.placed(name, limits, offset, {window: ring for window, ring in rings.items() if ring is not None})
        return windows.budget_states(placed.windows, self.cells, at)

    def shown_rates(self, name: str) -> HolderRates:
        """Return the counts of a holder that are not budgets, for an observer."""
        offset = self.shown_offset(name)
        return HolderRates(0.0, 0.0, 0) if offset is None else self.rates(Holder.placed(name, Limits(), offset, {}))

    def shown_cell(self, name: str, cell: int) -> float:
        """Return a cell of a record for an observer, 0 without the record."""
        offset = self.shown_offset(name)
        return 0.0 if offset is None else self.cells[offset + cell]

    # Decisions

    def reserve(
        self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment, reservation_ends: dict[int, float]
    ) -> tuple[Holder, ExceededLimit] | None:
        """Reserve amounts from each holder and return None, or reserve nothing and return the holder that refuses and its limit.

        ``reservation_ends``: see ``decision.admit``.
        """
        cells = self.cells
        if self._is_only_writer and not cells[_ANNOUNCED]:  # ``exclusive``, without its call
            return decision.admit(wanted, cells, at, reservation_ends)
        with self._lock:
            return decision.admit(wanted, cells, at, reservation_ends, self._worker, self.workers)

    def reserve_for_user(
        self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment, reservation_ends: dict[int, float]
    ) -> tuple[Holder, ExceededLimit] | None:
        """Do the same for holders of which some count an end user. Raises CountsMovedError if a holder counts another end user now."""
        cells = self.cells
        with self.exclusive():
            for holder, _ in wanted:
                if holder.number and cells[self.number_cell(holder)] != holder.number:
                    raise CountsMovedError
            return decision.admit(wanted, cells, at, reservation_ends, self._worker, self.workers)

    def settle(
        self, reserved: Iterable[tuple[Holder, Amounts]], reservation_ends: Mapping[int, float], used: Amounts, then: Moment, now: float
    ) -> None:
        """Replace what was reserved at ``then`` by what was used."""
        if self._is_only_writer and not self.cells[_ANNOUNCED]:
            decision.settle(reserved, self.cells, used, reservation_ends, now, then)
            return
        with self._lock:
            decision.settle(reserved, self.cells, used, reservation_ends, now, then, self._worker)


class UserCounts:
    """The counts of holders of which some count an end user, for reservations."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def reserve(
        self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment, reservation_ends: dict[int, float]
    ) -> tuple[Holder, ExceededLimit] | None:
        """Reserve as ``Buckets.reserve_for_user`` does."""
        return self._buckets.reserve_for_user(wanted, at, reservation_ends)


def _digest(name: str) -> bytes:
    return sha256(name.encode()).digest()


def _ring(name: str, window: str) -> str:
    """Return the name of the record of a rolling window. No holder's name has a line break."""
    return f"{name}\n{window}"


_UNLOCKED = nullcontext()
