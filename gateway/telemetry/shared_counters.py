"""Count in shared memory: a worker writes, control reads, neither waits for the other.

Control creates an anonymous memory file, which a worker inherits. The worker appends a record for each series on first use, and
afterwards adds to its float64 cells in place. Control reads the cells when Prometheus scrapes, so a scrape costs the workers
nothing. The counts of a killed worker remain for its successor.

The rule: one writer per file; a record is complete before the length that makes it visible is written.

Layout, little-endian: u64 bytes used, then records of (u32 length of the name, u32 number of cells, the name in UTF-8 padded to 8,
the cells). The name is opaque here.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from typing import TypeAlias

SIZE = 256 * 1024 * 1024
"""Bytes of address space per file. The file is sparse, so only what is written takes memory."""

_USED = struct.Struct("<Q")
_RECORD = struct.Struct("<II")
SharedCells: TypeAlias = "memoryview[float]"
"""A view of float64 cells in the shared memory."""


class SharedCountersFullError(Exception):
    """The memory has no capacity for another series."""


class SharedCounters:
    """One file of counters, mapped. ``fd`` is inherited by a child process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self._size)
        self._view = memoryview(self._map)
        self._index: dict[str, SharedCells] = {}
        self._seen = _USED.size  # end of the indexed part

    @classmethod
    def create(cls, name: str, size: int = SIZE) -> SharedCounters:
        """Create an empty file of counters."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        counters = cls(fd)
        _USED.pack_into(counters._view, 0, _USED.size)
        return counters

    def close(self) -> None:
        """Unmap and close. Views handed out before must not be used any more."""
        for cells in self._index.values():
            cells.release()
        self._index.clear()
        self._view.release()
        self._map.close()
        os.close(self.fd)

    def cells(self, name: str, count: int) -> SharedCells:
        """Return the cells of a series, created on first use. Raises SharedCountersFullError."""
        self._read_index()
        cells = self._index.get(name)
        return self._append(name, count) if cells is None else cells

    def find(self, name: str) -> SharedCells | None:
        """Return the cells of a series; None if its writer has not created it."""
        self._read_index()
        return self._index.get(name)

    def readings(self, prefix: str | tuple[str, ...] = "") -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield the name of every series that starts with the prefix, or with one of several, and its current values."""
        self._read_index()
        for name, cells in self._index.items():
            if name.startswith(prefix):
                yield name, tuple(cells)

    def new_names(self, seen: int) -> list[str]:
        """Return the names of the series after the first ``seen`` ones."""
        self._read_index()
        return list(itertools.islice(self._index, seen, None)) if len(self._index) > seen else []

    def _append(self, name: str, count: int) -> SharedCells:
        encoded = name.encode()
        start = self._seen
        padded = -(-len(encoded) // 8) * 8
        end = start + _RECORD.size + padded + 8 * count
        if end > self._size:
            raise SharedCountersFullError(name)
        _RECORD.pack_into(self._view, start, len(encoded), count)
        self._view[start + _RECORD.size : start + _RECORD.size + len(encoded)] = encoded
        self._view[end - 8 * count : end] = bytes(8 * count)  # a predecessor may have died while it wrote here
        _USED.pack_into(self._view, 0, end)
        self._read_index()
        return self._index[name]

    def _read_index(self) -> None:
        (used,) = _USED.unpack_from(self._view, 0)
        while self._seen < used:
            length, count = _RECORD.unpack_from(self._view, self._seen)
            start = self._seen + _RECORD.size
            name = str(self._view[start : start + length], "utf-8")
            first = start + -(-length // 8) * 8
            self._index[name] = self._view[first : first + 8 * count].cast("d")
            self._seen = first + 8 * count
