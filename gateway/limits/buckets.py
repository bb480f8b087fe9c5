"""The meters of a gateway: what each holder of limits has used, in memory that all its workers share.

An anonymous memory file that control makes and workers inherit, as with the scoreboards; here all of them write. The rules:
whoever reads in order to write holds the file's lock, which the system takes back from a process that dies; requests in
flight are counted apart for each worker, so that the successor of one that died begins with none; a meter is found by
what its holder is called, so counts outlive a reload and a worker.

Layout, little-endian: u64 workers, u64 meters, then for each meter 32 bytes of the name's SHA-256, its numbers as float64
(``rules``), and for each worker a float64 of what it has in flight.
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
from gateway.limits.rules import REQUESTS, SIZE, TOKENS, Amounts, ExceededLimit, Moment, is_longer
from gateway.snapshot.snapshot import Limits

_ROOM = 64 * 1024 * 1024  # bytes of address space; memory is used only for what is written (the file is sparse)
_HEAD = struct.Struct("<QQ")
_DIGEST = 32
_CELL = 8  # bytes of a float64


class Holder(NamedTuple):
    """One who has limits, and where the counts are: ``meter`` is the first cell of its meter in ``Buckets``."""

    name: str
    limits: Limits
    offset: int


class BucketsFullError(Exception):
    """There is no room for another holder."""


class Buckets:
    """The memory as one worker sees it. ``fd`` is what a child process inherits; -1 where it is this process's alone."""

    def __init__(self, memory: mmap.mmap, fd: int = -1, worker: int = 0) -> None:
        self.fd = fd
        self._map = memory
        self.cells = memoryview(memory).cast("d")
        self._workers: int = _HEAD.unpack_from(self._map)[0]
        self._is_alone = self._workers == 1
        self._own = SIZE + worker
        self._size: int = _DIGEST + _CELL * (SIZE + self._workers)
        self._offsets: dict[bytes, int] = {}
        self._lock = Lock() if self._is_alone else _Lock(fd)  # of one worker there is one thread: the cheapest that can be held
        with self._lock:
            self._find_new_holders()
            for place in self._offsets.values():
                self.cells[place + self._own] = 0.0

    @classmethod
    def private(cls) -> Buckets:
        """Meters for a worker that shares them with no other."""
        memory = mmap.mmap(-1, _ROOM)
        _HEAD.pack_into(memory, 0, 1, 0)
        return cls(memory)

    @classmethod
    def create(cls, name: str, workers: int) -> Buckets:
        """A new file without any meter, for so many workers."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, _ROOM)
        os.pwrite(fd, _HEAD.pack(workers, 0), 0)
        return cls(mmap.mmap(fd, _ROOM), fd)

    @classmethod
    def inherited(cls, fd: int, worker: int) -> Buckets:
        """A file that another process has made, for the worker of this number, which has nothing in flight yet."""
        return cls(mmap.mmap(fd, _ROOM), fd, worker)

    def close(self) -> None:
        self.cells.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)

    # Places

    def holder(self, name: str, limits: Limits, part: float = 1.0) -> Holder:
        """A holder with its meter, which is made for the first who asks, in a part of the room. Raises MetersFullError."""
        digest = sha256(name.encode()).digest()
        with self._lock:
            self._find_new_holders()
            return Holder(name, limits, self._offsets.get(digest) or self._append(digest, part))

    def _find_new_holders(self) -> None:
        """Learn of meters that other workers have made."""
        _, count = _HEAD.unpack_from(self._map)
        for number in range(len(self._offsets), count):
            start = _HEAD.size + number * self._size
            self._offsets[self._map[start : start + _DIGEST]] = (start + _DIGEST) // _CELL

    def _append(self, digest: bytes, part: float) -> int:
        count = len(self._offsets)
        start = _HEAD.size + count * self._size
        if start + self._size > len(self._map) * part:
            raise BucketsFullError(f"there are {count} holders of limits")
        self._map[start : start + self._size] = digest + bytes(self._size - _DIGEST)
        _HEAD.pack_into(self._map, 0, self._workers, count + 1)
        self._offsets[digest] = (start + _DIGEST) // _CELL
        return self._offsets[digest]

    # Counts

    def in_flight(self, meter: int) -> float:
        """Requests of a holder that are under way, in all workers."""
        slots = meter + SIZE
        return self.cells[slots] if self._is_alone else sum(self.cells[slots : slots + self._workers])

    def full_times(self, holders: Iterable[Holder]) -> list[tuple[Limits, float, float]]:
        """When each holder's buckets of requests and of tokens are full again."""
        cells = self.cells
        return [(holder.limits, cells[holder.offset + REQUESTS], cells[holder.offset + TOKENS]) for holder in holders]

    def _longest_refusal(self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment) -> tuple[Holder, ExceededLimit] | None:
        """Who of several refuses for the longest time."""
        worst: tuple[Holder, ExceededLimit] | None = None
        for holder, ask in wanted:
            refusal = rules.exceeded_limit(holder.limits, self.cells, holder.offset, self.in_flight(holder.offset), ask, at)
            if refusal is not None and (worst is None or is_longer(refusal, worst[1])):
                worst = holder, refusal
        return worst

    def reserve(self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment, ends: dict[int, float]) -> tuple[Holder, ExceededLimit] | None:
        """Take what is asked of each holder; or nothing, if one refuses, which is told with its reason. ``ends``: as in ``rules.admit``."""
        cells = self.cells
        with self._lock:
            if len(wanted) > 1 and (worst := self._longest_refusal(wanted, at)) is not None:
                return worst
            for holder, ask in wanted:
                meter, slots = holder.offset, ask.slots
                refusal = rules.admit(holder.limits, cells, meter, self.in_flight(meter) if slots else 0, ask, at, ends)
                if refusal is not None:
                    return holder, refusal
                if slots:
                    cells[meter + self._own] += slots
        return None

    def settle(
        self, reserved: Iterable[tuple[Holder, Amounts]], ends: Mapping[int, float], used: Amounts, then: Moment, now: float
    ) -> None:
        """Put what was used in the place of what was reserved at a moment, of each holder."""
        cells = self.cells
        with self._lock:
            for holder, ask in reserved:
                rules.settle(holder.limits, cells, holder.offset, ask, used, ends, now, then)
                if ask.slots:
                    cells[holder.offset + self._own] -= ask.slots


class _Lock:
    """The file's lock among processes (POSIX, so the system keeps no lock of a dead one)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
