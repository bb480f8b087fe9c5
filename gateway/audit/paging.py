"""The audit log in pages for a running gateway, the newest entries first.

The rules: a page reads only as much as it needs, from the end of the file or in the order of the table's index, and at most ``most_read``
lines. A page that has read so many without finding enough entries has fewer, and a cursor. The cursor has the offset of the last entry in
the file, so no page reads the entries of the pages before it. Entries are not verified here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from heapq import merge
from itertools import groupby
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from gateway.audit.chain import Line, read_line
from gateway.audit.lines import file_lines
from gateway.audit.listing import Filter, actor_text
from gateway.audit.log import Where
from gateway.store.cursor import cursor_to

_BLOCK = 64 * 1024  # bytes
_SEQ_BITS = 63  # of a number in the table
Position = tuple[datetime, str, int, int]
"""The time, chain and number of an entry, and where its line begins in the file, 0 with a table.

The first three order the table, where several gateways write.
"""


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """A query: the entries that match ``chosen`` and ``target``, a pattern with *.

    ``before`` is the last entry that was read, if any. ``most_read`` is the number of lines that a page may read.
    """

    chosen: Filter
    target: str | None
    size: int
    before: Position | None = None
    most_read: int = 20_000

    def matches(self, line: Line) -> bool:
        """Return whether an entry is listed."""
        return self.chosen.matches(line) and (self.target is None or fnmatchcase(line.target, self.target))


def audit_page(where: Where, query: AuditQuery) -> dict[str, Any]:
    """Return a page as JSON for an encoder of msgspec. May take as long as the disk.

    Raises OSError, DatabaseUnavailableError, and ValueError with a message for the client if the file has no such position any more.
    """
    found: list[dict[str, Any]] = []
    since = query.chosen.since
    for count, (start, line) in enumerate(_newest_first(where, query.before), 1):
        if since is not None and line.time < since:
            break
        if query.matches(line):
            found.append(_shown(line))
        if len(found) == query.size or count == query.most_read:
            return {"entries": found, "next_cursor": cursor_to(f"{line.time.isoformat()} {line.chain} {line.seq} {start}")}
    return {"entries": found, "next_cursor": None}


def position(text: str) -> Position | None:
    """Return the position of a cursor's text, None for the empty one. Raises ValueError with a message for the client."""
    if not text:
        return None
    try:
        moment, chain, *numbers = text.split(" ")
        seq, start = map(int, numbers)
        found = datetime.fromisoformat(moment).astimezone(UTC), chain, seq, start
        if seq.bit_length() > _SEQ_BITS or start < 0:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError("cursor: expected the next_cursor of an earlier page") from None
    return found


def _shown(line: Line) -> dict[str, Any]:
    more = {"origin": line.origin, "target": line.target, "before": line.before, "after": line.after}
    return {"time": line.time, "action": line.action, "actor": actor_text(line), **more, "chain": line.chain, "seq": line.seq}


def _order(line: Line) -> tuple[datetime, str, int]:
    return line.time, line.chain, line.seq


def _newest_first(where: Where, before: Position | None) -> Iterator[tuple[int, Line]]:
    """Yield the lines before a position, each with its offset in the file.

    The lines of a file are in the order of writing, so a clock that was set back hides none.
    """
    if where.table is None:
        for start, data in _from_end(where.file, before):
            if (line := read_line(data)) is not None:
                yield start, line
        return
    last = None if before is None else before[:3]
    found = file_lines(where.file) if where.file.exists() else ()
    waiting = sorted(filter(None, (read_line(data) for _, data in found)), key=_order, reverse=True)
    stored = filter(None, map(read_line, where.table.newest_first(last)))
    # An entry on its way to the table is in both for a moment, and is yielded once.
    for own, lines in groupby(merge(waiting, stored, key=_order, reverse=True), _order):
        if last is None or own < last:
            yield 0, next(lines)


def _from_end(file: Path, before: Position | None) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a file before a position, the last one first, each with its offset."""
    with file.open("rb") as opened:
        start, rest = opened.seek(0, SEEK_END), b""
        if before is not None:
            start = _checked(opened, start, before)
        while start:
            size = min(_BLOCK, start)
            start -= size
            opened.seek(start)
            first, *others = (opened.read(size) + rest).split(b"\n")
            offset = start + size + len(rest)
            for data in reversed(others):
                offset -= len(data)
                yield offset, data
                offset -= 1
            rest = first
        yield 0, rest


def _checked(opened: BinaryIO, size: int, position: Position) -> int:
    """Return the offset of an entry in a file of this size. Raises ValueError if another entry is there."""
    *order, start = position
    if start < size:
        opened.seek(start)
        line = read_line(opened.readline().rstrip(b"\n"))
        if line is not None and [*_order(line)] == order:
            return start
    raise ValueError("cursor: the file of the log was moved or replaced meanwhile; begin with the first page")
