"""Rows in shared memory: a worker appends, control reads, neither waits for the other.

A journal is an anonymous memory file that control makes and a worker inherits; it belongs to the worker's number and not to its
process, so what a worker had written when it was killed is read as if nothing had happened. It has two parts. The ring
holds the rows of requests that are over, until control has them on disk. The slots hold one row for each request that
is under way, as it is to be kept if its worker dies.

The rules: one writer and one reader; a frame is whole before the mark that makes it visible is moved, or shows by its checksum that
it is not; a row leaves the ring when the reader says that it is safe elsewhere; when there is no room a row is dropped and
counted, and nobody waits.

Layout: 8 marks of u64 (bytes ever appended, bytes ever released, rows dropped, the ring's bytes, the number of slots, rows ever
appended, rows ever released, one unused), the ring, the slots.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from gateway.ledger.row import HEAD, frame, frames

RING = 16 * 1024 * 1024
"""Bytes of rows that may wait for control: some 60,000 rows."""

SLOT, SLOTS = 1024, 8192
"""Bytes of a slot, and how many requests under way have one; memory is used only for those that ever were."""

_MARKS = 64
_APPENDED, _RELEASED, _DROPPED, _RING_SIZE, _SLOT_COUNT, _ROWS_APPENDED, _ROWS_RELEASED = range(7)
_EMPTY = bytes(HEAD.size)


@dataclass(frozen=True, slots=True)
class JournalBatch:
    """What a look at the ring found: whole frames, how many rows they are, and the mark to release once they are safe."""

    data: bytes
    rows: int
    end: int


class Journal:
    """One journal, mapped. ``fd`` is what a child process inherits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._view = memoryview(self._map)
        self._marks = self._view[:_MARKS].cast("Q")
        self._ring, self._slots = self._marks[_RING_SIZE], self._marks[_SLOT_COUNT]
        self._first_slot = _MARKS + self._ring
        self._appended = self._marks[_APPENDED]
        self._free = list(range(self._slots - 1, -1, -1))

    @classmethod
    def create(cls, name: str, ring: int = RING, slots: int = SLOTS) -> Journal:
        """A new, empty journal."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, _MARKS + ring + slots * SLOT)
        os.pwrite(fd, struct.pack("<5Q", 0, 0, 0, ring, slots), 0)
        return cls(fd)

    def close(self) -> None:
        self._marks.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)

    # The worker's side

    def append(self, payload: bytes) -> None:
        """Keep a row; without room it is dropped and counted."""
        framed = frame(payload)
        marks, before, ring = self._marks, self._appended, self._ring
        after = before + len(framed)
        if after - marks[_RELEASED] > ring:
            marks[_DROPPED] += 1
            return
        start = _MARKS + before % ring
        room = _MARKS + ring - start
        if len(framed) <= room:
            self._view[start : start + len(framed)] = framed
        else:
            self._view[start : start + room] = framed[:room]
            self._view[_MARKS : _MARKS + len(framed) - room] = framed[room:]
        self._appended = marks[_APPENDED] = after
        marks[_ROWS_APPENDED] += 1  # one too few for ever in a process that is killed just before this: see ``waiting_rows``

    def open_slot(self, payload: bytes) -> int | None:
        """Keep a row for the case that this process dies; returns its slot. None: there is no room, and it is not kept."""
        framed = frame(payload)
        if not self._free or len(framed) > SLOT:
            return None
        slot = self._free.pop()
        start = self._first_slot + slot * SLOT
        self._view[start : start + len(framed)] = framed
        return slot

    def clear_slot(self, slot: int) -> None:
        """The request is over, and its row appended."""
        start = self._first_slot + slot * SLOT
        self._view[start : start + HEAD.size] = _EMPTY
        self._free.append(slot)

    # Control's side

    @property
    def dropped(self) -> int:
        """Rows for which there was no room."""
        return self._marks[_DROPPED]

    @property
    def waiting_rows(self) -> int:
        """Rows in the ring: appended and not released."""
        return max(self._marks[_ROWS_APPENDED] - self._marks[_ROWS_RELEASED], 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of those rows."""
        return self._marks[_APPENDED] - self._marks[_RELEASED]

    def read(self) -> JournalBatch:
        """Everything that has been appended and not released."""
        released, ring = self._marks[_RELEASED], self._ring
        size = self._marks[_APPENDED] - released
        start = released % ring
        data = bytes(self._view[_MARKS + start : _MARKS + min(start + size, ring)])
        if len(data) < size:
            data += self._view[_MARKS : _MARKS + size - len(data)]
        payloads = list(frames(data))
        whole = sum(map(len, payloads)) + HEAD.size * len(payloads)
        return JournalBatch(data[:whole], len(payloads), released + whole)

    def release(self, reading: JournalBatch) -> None:
        """What was read is safe."""
        self._marks[_RELEASED] = reading.end
        self._marks[_ROWS_RELEASED] += reading.rows

    def open_rows(self) -> list[bytes]:
        """The rows of the requests that are under way; of a process that is gone, those that died with it."""
        return [
            payload for place in self._slot_offsets() if self._is_open(place) for payload in frames(bytes(self._view[place : place + SLOT]))
        ]

    def _slot_offsets(self) -> range:
        return range(self._first_slot, self._first_slot + self._slots * SLOT, SLOT)

    def _is_open(self, place: int) -> bool:
        return self._view[place : place + HEAD.size] != _EMPTY

    def clear_slots(self) -> None:
        """Empty the slots of a process that is gone, for the next one."""
        for place in self._slot_offsets():
            if self._is_open(place):
                self._view[place : place + HEAD.size] = _EMPTY
