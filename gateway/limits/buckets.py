"""Count what each holder of limits has used, in memory that all workers of a gateway share.

Control creates an anonymous memory file, which the workers inherit and write. The rules: a process that reads in order to write
holds the file lock, which the kernel releases if the process dies. Requests in flight are counted separately for each worker, so
the successor of a worker that died starts with none. Counts are found by the name of their holder, so they survive a reload and a
worker.

Layout, little-endian: u64 workers, u64 holders; then for each holder the SHA-256 of its name (32 bytes), its counts as float64 (see
``rules``), and for each worker a float64 of what it has in flight.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from threading import Lock
from typing import NamedTuple

from gateway.limits import rules
from gateway.limits.rules import REQUESTS, SIZE, TOKENS, Amounts, ExceededLimit, Moment, PeriodUse, is_longer
from gateway.snapshot.snapshot import Limits

_CAPACITY = 64 * 1024 * 1024  # bytes of address space; the file is sparse, so only what is written takes memory
_HEAD = struct.Struct("<QQ")
_DIGEST = 32
_CELL = 8  # bytes of a float64


class Holder(NamedTuple):
    """A holder of limits. ``offset`` is the first cell of its counts in ``Buckets``."""

    name: str
    limits: Limits
    offset: int


class BucketsFullError(Exception):
    """The memory has no capacity for another holder."""


class Buckets:
    """The shared counts as one worker sees them. ``fd`` is inherited by child processes; -1: not shared."""

    def __init__(self, memory: mmap.mmap, fd: int = -1, worker: int = 0, *, control_writes: bool = False) -> None:
        self.fd = fd
        self._map = memory
        self.cells = memoryview(memory).cast("d")
        self._workers: int = _HEAD.unpack_from(self._map)[0]
        self._is_alone = self._workers == 1
        self._own = SIZE + worker
        self._size: int = _DIGEST + _CELL * (SIZE + self._workers)
        self._offsets: dict[bytes, int] = {}
        # A single worker has one thread, so the cheapest lock will do, unless control restores counts from a ledger.
        self._lock = Lock() if self._is_alone and not control_writes else _Lock(fd)
        with self._lock:
            self._find_new_holders()
            for offset in self._offsets.values():
                self.cells[offset + self._own] = 0.0

    @classmethod
    def private(cls) -> Buckets:
        """Create counts for a single worker."""
        memory = mmap.mmap(-1, _CAPACITY)
        _HEAD.pack_into(memory, 0, 1, 0)
        return cls(memory)

    @classmethod
    def create(cls, name: str, workers: int) -> Buckets:
        """Create an empty file for a number of workers."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, _CAPACITY)
        os.pwrite(fd, _HEAD.pack(workers, 0), 0)
        return cls(mmap.mmap(fd, _CAPACITY), fd, control_writes=True)

    @classmethod
    def inherited(cls, fd: int, worker: int, *, control_writes: bool = False) -> Buckets:
        """Map the file of another process for this worker, which has nothing in flight yet.

        ``control_writes``: control may add counts while the worker runs.
        """
        return cls(mmap.mmap(fd, _CAPACITY), fd, worker, control_writes=control_writes)

    def close(self) -> None:
        self.cells.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)

    # Holders

    def holder(self, name: str, limits: Limits, part: float = 1.0) -> Holder:
        """Return a holder; its counts are created for the first request, in a part of the memory. Raises BucketsFullError."""
        digest = sha256(name.encode()).digest()
        with self._lock:
            self._find_new_holders()
            return Holder(name, limits, self._offsets.get(digest) or self._append(digest, part))

    def _find_new_holders(self) -> None:
        """Index the holders that other workers have added."""
        _, count = _HEAD.unpack_from(self._map)
        for number in range(len(self._offsets), count):
            start = _HEAD.size + number * self._size
            self._offsets[self._map[start : start + _DIGEST]] = (start + _DIGEST) // _CELL

    def _append(self, digest: bytes, part: float) -> int:
        count = len(self._offsets)
        start = _HEAD.size + count * self._size
        if start + self._size > len(self._map) * part:
            raise BucketsFullError(f"no capacity for another holder of limits: there are {count}")
        self._map[start : start + self._size] = digest + bytes(self._size - _DIGEST)
        _HEAD.pack_into(self._map, 0, self._workers, count + 1)
        self._offsets[digest] = (start + _DIGEST) // _CELL
        return self._offsets[digest]

    # Counts

    def add_earlier_use(self, holder: Holder, day: int, used: PeriodUse) -> None:
        """Add what a holder had used of a day and its month before these counts were created (see ``earlier_use``)."""
        with self._lock:
            rules.add_earlier_use(self.cells, holder.offset, day, used)

    def in_flight(self, offset: int) -> float:
        """Return a holder's requests in flight in all workers."""
        slots = offset + SIZE
        return self.cells[slots] if self._is_alone else sum(self.cells[slots : slots + self._workers])

    def full_times(self, holders: Iterable[Holder]) -> list[tuple[Limits, float, float]]:
        """Return for each holder when its buckets of requests and of tokens are full."""
        cells = self.cells
        return [(holder.limits, cells[holder.offset + REQUESTS], cells[holder.offset + TOKENS]) for holder in holders]

    def _longest_refusal(self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment) -> tuple[Holder, ExceededLimit] | None:
        """Return the holder that refuses for the longest time."""
        worst: tuple[Holder, ExceededLimit] | None = None
        for holder, amounts in wanted:
            refusal = rules.exceeded_limit(holder.limits, self.cells, holder.offset, self.in_flight(holder.offset), amounts, at)
            if refusal is not None and (worst is None or is_longer(refusal, worst[1])):
                worst = holder, refusal
        return worst

    def reserve(
        self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment, reservation_ends: dict[int, float]
    ) -> tuple[Holder, ExceededLimit] | None:
        """Reserve amounts from each holder and return None, or reserve nothing and return the holder that refuses and its limit.

        ``reservation_ends``: see ``rules.admit``.
        """
        cells = self.cells
        with self._lock:
            if len(wanted) > 1 and (worst := self._longest_refusal(wanted, at)) is not None:
                return worst
            for holder, amounts in wanted:
                offset, slots = holder.offset, amounts.slots
                refusal = rules.admit(holder.limits, cells, offset, self.in_flight(offset) if slots else 0, amounts, at, reservation_ends)
                if refusal is not None:
                    return holder, refusal
                if slots:
                    cells[offset + self._own] += slots
        return None

    def settle(
        self, reserved: Iterable[tuple[Holder, Amounts]], reservation_ends: Mapping[int, float], used: Amounts, then: Moment, now: float
    ) -> None:
        """Replace what was reserved at ``then`` by what was used."""
        cells = self.cells
        with self._lock:
            for holder, amounts in reserved:
                rules.settle(holder.limits, cells, holder.offset, amounts, used, reservation_ends, now, then)
                if amounts.slots:
                    cells[holder.offset + self._own] -= amounts.slots


class _Lock:
    """The file lock among processes. It is a POSIX lock, so the kernel releases it when its process dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
