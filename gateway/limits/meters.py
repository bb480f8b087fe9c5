"""The meters of a gateway: what each holder of limits has used, in memory that all its relays share.

An anonymous memory file that control makes and relays inherit, as with the scoreboards; here all of them write. The rules:
whoever reads in order to write holds the file's lock, which the system takes back from a process that dies; requests in
flight are counted apart for each relay, so that the successor of one that died begins with none; a meter is found by
what its holder is called, so counts outlive a reload and a relay.

Layout, little-endian: u64 relays, u64 meters, then for each meter 32 bytes of the name's SHA-256, the float64 of a
``Meter``, and for each relay a float64 of what it has in flight.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from hashlib import sha256
from threading import Lock
from typing import NamedTuple

from gateway.limits.rules import Ask, Meter, Moment, Refused, Window, admitted, outlasts, settled
from gateway.state import Limits

_ROOM = 64 * 1024 * 1024  # bytes of address space; memory is used only for what is written (the file is sparse)
_HEAD = struct.Struct("<QQ")
_DIGEST = 32
_METER = struct.Struct("<16d")
_CELL = 8  # bytes of a float64
_SLOTS = _METER.size // _CELL  # where the requests in flight are, in cells behind the first one
_NEVER = Window()


class Holder(NamedTuple):
    """One who has limits, and where the counts are: ``meter`` is the first cell of its meter in ``Meters``."""

    name: str
    limits: Limits
    meter: int


class MetersFullError(Exception):
    """There is no room for another holder."""


class Meters:
    """The memory as one relay sees it. ``fd`` is what a child process inherits; -1 where it is this process's alone."""

    def __init__(self, memory: mmap.mmap, fd: int = -1, relay: int = 0) -> None:
        self.fd = fd
        self._map = memory
        self._cells = memoryview(memory).cast("d")
        self._relays: int = _HEAD.unpack_from(self._map)[0]
        self._is_alone = self._relays == 1
        self._own = _SLOTS + relay
        self._size: int = _DIGEST + _METER.size + _CELL * self._relays
        self._places: dict[bytes, int] = {}
        self._lock = Lock() if self._is_alone else _Lock(fd)  # of one relay there is one thread: the cheapest that can be held
        with self._lock:
            self._look()
            for place in self._places.values():
                self._cells[place + self._own] = 0.0

    @classmethod
    def private(cls) -> Meters:
        """Meters for a relay that shares them with no other."""
        memory = mmap.mmap(-1, _ROOM)
        _HEAD.pack_into(memory, 0, 1, 0)
        return cls(memory)

    @classmethod
    def create(cls, name: str, relays: int) -> Meters:
        """A new file without any meter, for so many relays."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, _ROOM)
        os.pwrite(fd, _HEAD.pack(relays, 0), 0)
        return cls(mmap.mmap(fd, _ROOM), fd)

    @classmethod
    def inherited(cls, fd: int, relay: int) -> Meters:
        """A file that another process has made, for the relay of this number, which has nothing in flight yet."""
        return cls(mmap.mmap(fd, _ROOM), fd, relay)

    def close(self) -> None:
        self._cells.release()
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)

    # Places

    def holder(self, name: str, limits: Limits) -> Holder:
        """A holder with its meter, which is made for the first who asks. Raises MetersFullError."""
        digest = sha256(name.encode()).digest()
        with self._lock:
            self._look()
            return Holder(name, limits, self._places.get(digest) or self._append(digest))

    def _look(self) -> None:
        """Learn of meters that other relays have made."""
        _, count = _HEAD.unpack_from(self._map)
        for number in range(len(self._places), count):
            start = _HEAD.size + number * self._size
            self._places[self._map[start : start + _DIGEST]] = (start + _DIGEST) // _CELL

    def _append(self, digest: bytes) -> int:
        count = len(self._places)
        start = _HEAD.size + count * self._size
        if start + self._size > len(self._map):
            raise MetersFullError(f"there are {count} holders of limits")
        self._map[start : start + self._size] = digest + bytes(self._size - _DIGEST)
        _HEAD.pack_into(self._map, 0, self._relays, count + 1)
        self._places[digest] = (start + _DIGEST) // _CELL
        return self._places[digest]

    # Counts

    def read(self, place: int, *, calendar: bool = True) -> Meter:
        """The meter at a place; without days and months where nobody is to look at them."""
        cells = self._cells
        in_flight = cells[place + _SLOTS] if self._is_alone else sum(cells[place + _SLOTS : place + _SLOTS + self._relays])
        if not calendar or not cells[place + 4]:  # the period of its day, which has one if its month has
            return Meter(cells[place], cells[place + 1], cells[place + 2], cells[place + 3], _NEVER, _NEVER, in_flight)
        values = _METER.unpack_from(self._map, place * _CELL)
        return Meter(values[0], values[1], values[2], values[3], Window(*values[4:10]), Window(*values[10:]), in_flight)

    def buckets(self, holders: Iterable[Holder]) -> list[tuple[Limits, float, float]]:
        """When each holder's buckets of requests and of tokens are full again."""
        cells = self._cells
        return [(holder.limits, cells[holder.meter], cells[holder.meter + 1]) for holder in holders]

    def _write(self, place: int, after: Meter, slots: int) -> None:
        """``slots``: how many more of the requests in flight are this relay's."""
        cells = self._cells
        if after.day is _NEVER:
            cells[place], cells[place + 1] = after.requests, after.tokens
        else:
            buckets = after.requests, after.tokens, after.requests_back, after.tokens_back
            _METER.pack_into(self._map, place * _CELL, *buckets, *after.day, *after.month)
        if slots:
            cells[place + self._own] += slots

    def take(self, wanted: Iterable[tuple[Holder, Ask]], at: Moment, ends: dict[int, float]) -> tuple[Holder, Refused] | None:
        """Take what is asked of each holder; or nothing, if one refuses, which is told with its reason.

        ``ends`` learns, by the cells of the buckets, until when what was taken is missing; ``settle`` needs it again.
        """
        worst: tuple[Holder, Refused] | None = None
        changes = []
        with self._lock:
            for holder, ask in wanted:
                before = self.read(holder.meter, calendar=bool(ask.tokens or ask.cost))
                after, refused = admitted(holder.limits, before, ask, at)
                if refused is None:
                    changes.append((holder.meter, after, ask))
                elif worst is None or outlasts(refused, worst[1]):
                    worst = holder, refused
            if worst is None:
                for place, after, ask in changes:
                    self._write(place, after, ask.slots)
                    if ask.requests:
                        ends[place] = after.requests + after.requests_back
                    if ask.tokens:
                        ends[place + 1] = after.tokens + after.tokens_back
        return worst

    def settle(self, reserved: Iterable[tuple[Holder, Ask]], ends: Mapping[int, float], used: Ask, then: Moment, now: float) -> None:
        """Put what was used in the place of what was reserved at a moment, of each holder."""
        cells = self._cells
        with self._lock:
            for holder, ask in reserved:
                place = holder.meter
                of_requests, of_tokens = ends.get(place, 0.0), ends.get(place + 1, 0.0)
                after = settled(holder.limits, self.read(place), ask, used, of_requests, of_tokens, now, then)
                self._write(place, after, used.slots - ask.slots)
                cells[place + 2], cells[place + 3] = after.requests_back, after.tokens_back


class _Lock:
    """The file's lock among processes (POSIX, so the system keeps no lock of a dead one)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
