"""The lines of the audit log, as readers find them in files and in the table, each with a text that names it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from errno import EIO
from functools import cmp_to_key
from gzip import open as gzip_open
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.audit.chain import Line, read_line

if TYPE_CHECKING:
    from gateway.audit.log import Where


_MOVED = re.compile(r"[.-]\d[\dTZ.:_-]*(\.gz)?")
"""The text that a rotation appends to the name of a file: a number or a time. A copy with another name is not part of the log."""


def moved_files(log: Where) -> list[Path]:
    """Return the files beside a log that a rotation has moved there, the oldest first. Raises OSError."""
    if log.table is not None:
        return []
    begun: list[tuple[Line, Path]] = []
    for file in log.file.parent.iterdir():
        if file.name.startswith(log.file.name) and _MOVED.fullmatch(file.name[len(log.file.name) :]):
            first = next((read_line(data) for _, data in file_lines(file)), None)
            if first is not None:
                begun.append((first, file))
    return [file for _, file in sorted(begun, key=cmp_to_key(_compared))]


def _compared(first: tuple[Line, Path], second: tuple[Line, Path]) -> int:
    """Compare two files by the first line of each: by number within a chain, otherwise by time, because a clock may have been set back."""
    one, other = first[0], second[0]
    return one.seq - other.seq if one.chain == other.chain else 1 if one.time > other.time else -1


def log_lines(log: Where, older: Sequence[Path] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a log, after those of ``older`` files. Raises OSError and DatabaseUnavailableError."""
    for each in older:
        yield from file_lines(each)
    if log.table is None:
        yield from file_lines(log.file)
    else:
        waiting = list(file_lines(log.file)) if log.file.exists() else []  # read first: entries move from here to the table
        yield from merged(log.table.read(), waiting)


def file_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file. An incomplete line at the end is being written, or was not acknowledged. Raises OSError."""
    with gzip_open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        try:
            for number, line in enumerate(opened, 1):
                if line.endswith(b"\n"):
                    yield f"{file}:{number}", line[:-1]
        except (EOFError, zlib.error):
            raise OSError(EIO, "it is damaged", str(file)) from None


def merged(stored: Iterable[tuple[str, bytes]], waiting: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of the table, then those that wait on disk and are not in the table yet."""
    seen: dict[str, int] = {}
    for where, data in stored:
        if (line := read_line(data)) is not None:
            seen[line.chain] = line.seq
        yield where, data
    for where, data in waiting:
        line = read_line(data)
        if line is None or line.seq > seen.get(line.chain, 0):
            yield where, data
