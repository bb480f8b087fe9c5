"""Counts in shared memory: a worker writes, control reads, neither waits for the other.

A board is an anonymous memory file that control makes and a worker inherits. The worker appends a record per
series the first time it is used and from then on adds to its float64 cells in place. Control reads the cells
when Prometheus asks: a scrape costs the workers nothing, and what a worker had counted when it was killed is
still there for the process that takes over its board.

The rule: one writer per board; a record is complete before the length that makes it visible is written.

Layout, little-endian: u64 bytes used, then records of (u32 length of the name, u32 number of cells, the name
in UTF-8 padded to 8, the cells). The name is opaque here.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

SIZE = 256 * 1024 * 1024
"""Bytes of address space per board; memory is used only for what is written (the file is sparse)."""

_USED = struct.Struct("<Q")
_RECORD = struct.Struct("<II")
Cells: TypeAlias = "memoryview[float]"
"""A view of float64 cells in the board."""


@dataclass(frozen=True, slots=True)
class CounterReading:
    """One series as it stood at the moment of reading."""

    name: str
    values: tuple[float, ...]


class SharedCountersFullError(Exception):
    """There is no room for another series."""


class SharedCounters:
    """One board, mapped. ``fd`` is what a child process inherits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self._size)
        self._view = memoryview(self._map)
        self._index: dict[str, Cells] = {}
        self._seen = _USED.size  # how far the index has read

    @classmethod
    def create(cls, name: str, size: int = SIZE) -> SharedCounters:
        """A new, empty board."""
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        board = cls(fd)
        _USED.pack_into(board._view, 0, _USED.size)
        return board

    def close(self) -> None:
        """Unmap and close; views handed out before must not be used any more."""
        for cells in self._index.values():
            cells.release()
        self._index.clear()
        self._view.release()
        self._map.close()
        os.close(self.fd)

    def cells(self, name: str, count: int) -> Cells:
        """The cells of a series, made on first use. Raises BoardFullError."""
        self._read_index()
        found = self._index.get(name)
        return self._append(name, count) if found is None else found

    def readings(self, prefix: str = "") -> Iterator[CounterReading]:
        """Every series whose name begins so, with its present values."""
        self._read_index()
        for name, cells in self._index.items():
            if name.startswith(prefix):
                yield CounterReading(name, tuple(cells))

    def new_names(self, seen: int) -> list[str]:
        """The names of the series after the first ``seen`` ones."""
        self._read_index()
        return list(itertools.islice(self._index, seen, None)) if len(self._index) > seen else []

    def _append(self, name: str, count: int) -> Cells:
        encoded = name.encode()
        start = self._seen
        padded = -(-len(encoded) // 8) * 8
        end = start + _RECORD.size + padded + 8 * count
        if end > self._size:
            raise SharedCountersFullError(name)
        _RECORD.pack_into(self._view, start, len(encoded), count)
        self._view[start + _RECORD.size : start + _RECORD.size + len(encoded)] = encoded
        self._view[end - 8 * count : end] = bytes(8 * count)  # a predecessor may have died in this very place
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
