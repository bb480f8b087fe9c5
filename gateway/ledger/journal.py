"""Keep rows in shared memory: a worker appends, control reads, neither waits for the other.

Control creates an anonymous memory file, which a worker inherits. It belongs to the number of the worker, not to the process, so
the rows of a killed worker are still read. The ring holds the rows of finished requests until control has them on disk. The slots
hold one row for each open request, as it is stored if the worker dies, and what its stream has used so far.

The rules: one writer and one reader. A frame is complete before the mark that makes it visible is moved, or its checksum shows that
it is not. A row leaves the ring when the reader says that it is safe elsewhere. If there is no space, a row is dropped and counted,
and nothing waits.

Layout: 8 marks of u64 (bytes ever appended, bytes ever released, rows dropped, the ring's bytes, the number of slots, rows ever
appended, rows ever released, one unused), the ring, the slots.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from gateway.ledger.row import HEAD, frame, frames, with_usage_tail

RING = 16 * 1024 * 1024
"""Bytes of rows that may wait for control: about 60,000 rows."""

SLOT, SLOTS = 1280, 8192
"""Bytes of a slot, and the number of slots for open requests. Only slots that were used take memory."""
ROW_SIZE, TAIL_SIZE = 1024, 254
"""Bytes of a slot for the row with length and checksum, and for the usage tail (``gateway.api.usage``) after two bytes of its length."""

_MARKS = 64
_APPENDED, _RELEASED, _DROPPED, _RING_SIZE, _SLOT_COUNT, _ROWS_APPENDED, _ROWS_RELEASED = range(7)
_EMPTY = bytes(HEAD.size)
_NO_TAIL = bytes(2)


@dataclass(frozen=True, slots=True)
class JournalBatch:
    """Whole frames from the ring, the number of their rows, and the mark to release once they are safe."""

    data: bytes
    rows: int
    end: int


class Journal:
    """One journal, mapped. ``fd`` is inherited by a child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._view = memoryview(self._map)
        self._marks = self._view[:_MARKS].cast("Q")
        self._ring, self._slots = self._marks[_RING_SIZE], self._marks[_SLOT_COUNT]
        self._first_slot = _MARKS + self._ring
        self._ring_view = self._view[_MARKS : self._first_slot]
        self._appended = self._marks[_APPENDED]
        self._free_until = 0  # bytes that may be appended in total, as far as this worker knows
        self._free = list(range(self._slots - 1, -1, -1))

    @classmethod
    def create(cls, name: str, ring: int = RING, slots: int = SLOTS) -> Journal:
        """Create an empty journal."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, _MARKS + ring + slots * SLOT)
        os.pwrite(fd, struct.pack("<5Q", 0, 0, 0, ring, slots), 0)
        return cls(fd)

    def close(self) -> None:
        self._marks.release()
        self._ring_view.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)

    # The worker's side

    def append(self, payload: bytes) -> None:
        """Append a row; without space it is dropped and counted."""
        framed = frame(payload)
        marks, before, ring = self._marks, self._appended, self._ring
        after = before + len(framed)
        if after > self._free_until:
            self._free_until = marks[_RELEASED] + ring
            if after > self._free_until:
                marks[_DROPPED] += 1
                return
        start = before % ring
        end = start + len(framed)
        if end <= ring:
            self._ring_view[start:end] = framed
        else:
            self._ring_view[start:] = framed[: ring - start]
            self._ring_view[: end - ring] = framed[ring - start :]
        self._appended = marks[_APPENDED] = after
        marks[_ROWS_APPENDED] += 1  # one too few forever if the process is killed just before this: see ``waiting_rows``

    def open_slot(self, payload: bytes) -> int | None:
        """Store a row in case this process dies, and return its slot. None if it was not stored for lack of space."""
        framed = frame(payload)
        if not self._free or len(framed) > ROW_SIZE:
            return None
        slot = self._free.pop()
        start = self._first_slot + slot * SLOT
        self._view[start : start + len(framed)] = framed
        return slot

    def update_slot(self, slot: int, tail: bytes) -> None:
        """Store the usage tail of an open request. A tail that is too long is not stored. A slot must be cleared with an empty tail."""
        size = len(tail)
        if size <= TAIL_SIZE:
            start = self._first_slot + slot * SLOT + ROW_SIZE
            self._view[start : start + 2 + size] = size.to_bytes(2, "little") + tail

    def clear_slot(self, slot: int) -> None:
        """Clear the slot of a request whose row is appended."""
        start = self._first_slot + slot * SLOT
        self._view[start : start + HEAD.size] = _EMPTY
        self._free.append(slot)

    # Control's side

    @property
    def dropped(self) -> int:
        """Number of rows dropped for lack of space."""
        return self._marks[_DROPPED]

    @property
    def waiting_rows(self) -> int:
        """Number of rows in the ring: appended and not released."""
        return max(self._marks[_ROWS_APPENDED] - self._marks[_ROWS_RELEASED], 0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the rows in the ring."""
        return self._marks[_APPENDED] - self._marks[_RELEASED]

    def read(self) -> JournalBatch:
        """Return everything that was appended and not released."""
        released, ring = self._marks[_RELEASED], self._ring
        size = self._marks[_APPENDED] - released
        start = released % ring
        data = bytes(self._view[_MARKS + start : _MARKS + min(start + size, ring)])
        if len(data) < size:
            data += self._view[_MARKS : _MARKS + size - len(data)]
        payloads = list(frames(data))
        whole = sum(map(len, payloads)) + HEAD.size * len(payloads)
        return JournalBatch(data[:whole], len(payloads), released + whole)

    def release(self, batch: JournalBatch) -> None:
        """Release a batch that is safe elsewhere."""
        self._marks[_RELEASED] = batch.end
        self._marks[_ROWS_RELEASED] += batch.rows

    def open_rows(self) -> list[bytes]:
        """Return the rows of open requests; after a crash, of the requests that ended with the process."""
        rows = []
        for offset in self._open_slots():
            slot = bytes(self._view[offset : offset + SLOT])
            size = int.from_bytes(slot[ROW_SIZE : ROW_SIZE + 2], "little")
            tail = slot[ROW_SIZE + 2 : ROW_SIZE + 2 + size]
            rows += [with_usage_tail(payload, tail) for payload in frames(slot[:ROW_SIZE])]
        return rows

    def _open_slots(self) -> list[int]:
        """Return the offsets of the slots that have a row."""
        offsets = range(self._first_slot, self._first_slot + self._slots * SLOT, SLOT)
        return [offset for offset in offsets if self._view[offset : offset + HEAD.size] != _EMPTY]

    def clear_slots(self) -> None:
        """Clear the slots of a process that has ended, for its successor."""
        for offset in self._open_slots():
            self._view[offset : offset + HEAD.size] = _EMPTY
            self._view[offset + ROW_SIZE : offset + ROW_SIZE + 2] = _NO_TAIL
