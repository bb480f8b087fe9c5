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
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from hashlib import sha256
from typing import NamedTuple

from gateway.limits import rules
from gateway.limits.rules import Ask, Meter, Moment, Refused, Window
from gateway.state import Limits

_ROOM = 64 * 1024 * 1024  # bytes of address space; memory is used only for what is written (the file is sparse)
_HEAD = struct.Struct("<QQ")
_DIGEST = 32
_METER = struct.Struct("<14d")
_BUCKETS = struct.Struct("<2d")
_SLOTS = struct.Struct("<d")
_NEVER = Window()


class Holder(NamedTuple):
    """One who has limits, and where the counts are: ``meter`` is a place in ``Meters``."""

    name: str
    limits: Limits
    meter: int


class Taken(NamedTuple):
    """Who refused, and why, if anybody did; and the meters then."""

    refused: tuple[Holder, Refused] | None
    meters: Sequence[Meter]


class MetersFullError(Exception):
    """There is no room for another holder."""


class Meters:
    """The memory as one relay sees it. ``fd`` is what a child process inherits; -1 where it is this process's alone."""

    def __init__(self, memory: mmap.mmap, fd: int = -1, relay: int = 0) -> None:
        self.fd = fd
        self._map = memory
        self._relays: int = _HEAD.unpack_from(self._map)[0]
        self._own = _DIGEST + _METER.size + _SLOTS.size * relay
        self._size: int = _DIGEST + _METER.size + _SLOTS.size * self._relays
        self._in_flight = struct.Struct(f"<{self._relays}d")
        self._places: dict[bytes, int] = {}
        self._lock = nullcontext() if self._relays == 1 else _Lock(fd)
        with self._lock:
            self._look()
            for place in self._places.values():
                self._set_own(place, 0)

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
            self._places[self._map[start : start + _DIGEST]] = start

    def _append(self, digest: bytes) -> int:
        count = len(self._places)
        start = _HEAD.size + count * self._size
        if start + self._size > len(self._map):
            raise MetersFullError(f"there are {count} holders of limits")
        self._map[start : start + self._size] = digest + bytes(self._size - _DIGEST)
        _HEAD.pack_into(self._map, 0, self._relays, count + 1)
        self._places[digest] = start
        return start

    # Counts

    def read(self, place: int) -> Meter:
        """The meter at a place."""
        values = _METER.unpack_from(self._map, place + _DIGEST)
        in_flight = self._in_flight.unpack_from(self._map, place + _DIGEST + _METER.size)
        return Meter(
            values[0],
            values[1],
            Window(*values[2:8]) if values[2] else _NEVER,
            Window(*values[8:]) if values[8] else _NEVER,
            int(in_flight[0] if len(in_flight) == 1 else sum(in_flight)),
        )

    def _write(self, place: int, before: Meter, after: Meter) -> None:
        if after.day is before.day and after.month is before.month:
            _BUCKETS.pack_into(self._map, place + _DIGEST, after.requests, after.tokens)
        else:
            _METER.pack_into(self._map, place + _DIGEST, after.requests, after.tokens, *after.day, *after.month)
        if after.in_flight != before.in_flight:
            (own,) = _SLOTS.unpack_from(self._map, place + self._own)
            self._set_own(place, own + after.in_flight - before.in_flight)

    def _set_own(self, place: int, slots: float) -> None:
        _SLOTS.pack_into(self._map, place + self._own, slots)

    def take(self, wanted: Sequence[tuple[Holder, Ask]], at: Moment) -> Taken:
        """Take what is asked of each holder, or nothing."""
        with self._lock:
            before = [self.read(holder.meter) for holder, _ in wanted]
            worst: tuple[Holder, Refused] | None = None
            after = []
            for (holder, ask), meter in zip(wanted, before, strict=True):
                taken, refused = rules.admitted(holder.limits, meter, ask, at)
                after.append(taken)
                if refused is not None and (worst is None or rules.outlasts(refused, worst[1])):
                    worst = holder, refused
            if worst is not None:
                return Taken(worst, before)
            for (holder, _), old, new in zip(wanted, before, after, strict=True):
                self._write(holder.meter, old, new)
        return Taken(None, after)

    def settle(self, reserved: Iterable[tuple[Holder, Ask]], used: Ask, then: Moment, now: float) -> None:
        """Put what was used in the place of what was reserved at a moment, of each holder."""
        day, month = then.day, then.month
        with self._lock:
            for holder, ask in reserved:
                meter = self.read(holder.meter)
                self._write(holder.meter, meter, rules.settled(holder.limits, meter, ask, used, now, day, month))


class _Lock:
    """The file's lock among processes (POSIX, so the system keeps no lock of a dead one)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
