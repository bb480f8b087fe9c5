"""The lines of the audit log, as readers find them in files and in the table, each with a text that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.audit.chain import read_line

if TYPE_CHECKING:
    from gateway.audit.log import Where


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
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.endswith(b"\n"):
                yield f"{file}:{number}", line[:-1]


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
