"""The placement log: each process's observations of servers, in shared memory for all others.

Each worker writes the placements of its requests, and control writes the engines' load. Every worker reads
the records of all others, so all prefix indexes and backlogs are nearly equal. The rules: one writer for each section; a record is complete
before the length that makes it visible is written; a record never crosses the end of its section, so each lap starts with a record. A
reader that falls behind by more than half a section loses the records in between, and counts that.

Layout, in signed 64-bit cells: for each section the number of cells written so far; then the sections. A record has a header (kind, number
of keys, server), a value, and its keys.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

CELLS = 1 << 20
"""Words of a section: 8 MiB of address space. Only what is written takes memory."""
_HEADER = 2  # cells of a record before its keys
_MOST_KEYS = 1 << 14  # of a record


class Kind(IntEnum):
    """The kinds of records, with the meaning of their value."""

    PADDING = 0
    """The rest of this lap is unused."""
    PLACED = 1
    """A worker sends a request: the tokens to compute."""
    FINISHED = 2
    """A request has ended: the generated tokens."""
    STARTED = 3
    """The process of this section is new: its predecessor's requests have ended."""
    LOAD = 4
    """A sample of an engine's load: the time in nanoseconds; the keys are the running and the waiting
    requests, and the used share of its KV cache in thousandths."""
    CAPACITY = 5
    """The size of a server's KV cache in tokens."""


class Record(NamedTuple):
    """One record. ``section``: its writer. ``server``: the key of the server's name."""

    section: int
    kind: Kind
    server: int
    value: int
    keys: Sequence[int]


def server_key(name: str) -> int:
    """Return the key of a server's name, equal in all processes."""
    return crc32(name.encode())


class PlacementLog:
    """The log, mapped. A child process inherits ``fd``. ``section``: the own one; ``sections``: of all processes."""

    def __init__(self, fd: int, section: int, cells: int = CELLS) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._bytes = memoryview(self._map)
        self._view = self._bytes.cast("q")
        self._cells = cells
        self._most_keys = min(_MOST_KEYS, cells // 8)
        self.sections = len(self._view) // (cells + 1)
        self.section = section
        self._base = self.sections + section * cells
        self._written = self._view[section]
        self._seen = [self._history_start(other) for other in range(self.sections)]
        self._has_history = self._seen[section] < self._written
        self._lengths = self._view[: self.sections]
        self._known: list[int] = []
        self.lost = 0
        """How often this reader fell behind and lost records."""

    @classmethod
    def create(cls, sections: int, section: int, cells: int = CELLS) -> PlacementLog:
        """Create an empty log."""
        fd = os.memfd_create("placements")
        os.ftruncate(fd, 8 * sections * (cells + 1))
        return cls(fd, section, cells)

    def close(self) -> None:
        """Unmap and close."""
        for view in (self._lengths, self._view, self._bytes):
            view.release()
        self._map.close()
        os.close(self.fd)

    def write(self, kind: Kind, server: int, value: int = 0, keys: Sequence[int] = ()) -> None:
        """Append a record to the own section. Keys beyond a bound are left out."""
        if len(keys) > self._most_keys:
            keys = keys[: self._most_keys]
        record = array("q", (kind << 56 | len(keys) << 32 | server, value, *keys))
        length, cells = len(record), self._cells
        start = self._written % cells
        if start + length > cells:
            self._view[self._base + start] = Kind.PADDING << 56
            self._written += cells - start
            start = 0
        self._view[self._base + start : self._base + start + length] = memoryview(record)
        self._written += length
        self._view[self.section] = self._written
        if self._known:
            self._known[self.section] = self._written

    def read(self) -> Iterator[Record]:
        """Yield the records of all other sections since the last call.

        The first call also yields the records of an earlier process of the own section.
        """
        lengths = self._lengths.tolist()
        if lengths == self._known:
            return
        self._known = lengths
        if self._has_history:
            self._has_history = False
            yield from self._read_section(self.section, self._written)
        for section, written in enumerate(lengths):
            if section != self.section and written != self._seen[section]:
                yield from self._read_section(section, written)

    def _read_section(self, section: int, written: int) -> Iterator[Record]:
        view, cells, base, reach = self._view, self._cells, self.sections + section * self._cells, self._cells // 2
        position = self._seen[section]
        while position < written:
            start = base + position % cells
            header, value = view[start], view[start + 1]
            count = header >> 32 & 0xFFFFFF
            keys = view[start + _HEADER : start + _HEADER + count].tolist()
            if view[section] - position > reach:  # the writer may have overwritten it
                self.lost += 1
                position = view[section]
            elif header >> 56 == Kind.PADDING:
                position += cells - position % cells
            else:
                position += _HEADER + count
                yield Record(section, Kind(header >> 56), header & 0xFFFFFFFF, value, keys)
        self._seen[section] = position

    def _history_start(self, section: int) -> int:
        """Return the position from which a new reader can read: the start of the writer's lap, unless that is too far behind."""
        written = self._view[section]
        in_lap = written % self._cells
        return written - in_lap if in_lap <= self._cells // 2 else written
