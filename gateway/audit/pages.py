"""The audit log in pages for a running gateway, the newest entries first.

The rules: a page reads only as much as it needs, from the end of the file or in the order of the table's index, and at most ``most_read``
lines. A page that has read so many without finding enough entries has fewer, and a cursor. Entries are not verified here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from heapq import merge
from itertools import dropwhile, groupby, islice
from os import SEEK_END
from pathlib import Path
from typing import Any

from gateway.audit.chain import Line, read_line
from gateway.audit.lines import file_lines
from gateway.audit.listing import Filter, actor_text
from gateway.audit.log import Where
from gateway.store.cursor import cursor_to

_BLOCK = 64 * 1024  # bytes
_SEQ_BITS = 63  # of a number in the table
Position = tuple[datetime, str, int]
"""The time, chain and number of an entry. They order the table, where several gateways write."""


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
    """Return a page as JSON for an encoder of msgspec. May take as long as the disk. Raises OSError and DatabaseUnavailableError."""
    found: list[dict[str, Any]] = []
    since = query.chosen.since
    for count, line in enumerate(_newest_first(where, query.before), 1):
        if since is not None and line.time < since:
            break
        if query.matches(line):
            found.append(_shown(line))
        if len(found) == query.size or count == query.most_read:
            return {"entries": found, "next_cursor": cursor_to(f"{line.time.isoformat()} {line.chain} {line.seq}")}
    return {"entries": found, "next_cursor": None}


def position(text: str) -> Position | None:
    """Return the position of a cursor's text, None for the empty one. Raises ValueError with a message for the client."""
    if not text:
        return None
    try:
        moment, chain, seq = text.split(" ")
        found = datetime.fromisoformat(moment).astimezone(UTC), chain, int(seq)
        if found[2].bit_length() > _SEQ_BITS:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError("cursor: expected the next_cursor of an earlier page") from None
    return found


def _shown(line: Line) -> dict[str, Any]:
    more = {"origin": line.origin, "target": line.target, "before": line.before, "after": line.after}
    return {"time": line.time, "action": line.action, "actor": actor_text(line), **more, "chain": line.chain, "seq": line.seq}


def _position(line: Line) -> Position:
    return line.time, line.chain, line.seq


def _newest_first(where: Where, before: Position | None) -> Iterator[Line]:
    """Yield the lines before a position. The lines of a file are in the order of writing, so a clock that was set back hides none."""
    if where.table is None:
        lines: Iterator[Line] = filter(None, map(read_line, _from_end(where.file)))
        return lines if before is None else islice(dropwhile(lambda line: _position(line) != before, lines), 1, None)
    found = file_lines(where.file) if where.file.exists() else ()
    waiting = sorted(filter(None, (read_line(data) for _, data in found)), key=_position, reverse=True)
    stored = filter(None, map(read_line, where.table.newest_first(before)))
    # An entry on its way to the table is in both for a moment, and is yielded once.
    both = groupby(merge(waiting, stored, key=_position, reverse=True), _position)
    return (next(lines) for own, lines in both if before is None or own < before)


def _from_end(file: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, the last one first."""
    with file.open("rb") as opened:
        start, rest = opened.seek(0, SEEK_END), b""
        while start:
            size = min(_BLOCK, start)
            start -= size
            opened.seek(start)
            first, *others = (opened.read(size) + rest).split(b"\n")
            yield from reversed(others)
            rest = first
        yield rest
