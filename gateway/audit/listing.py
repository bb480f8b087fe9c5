"""Entries for a terminal: which ones are listed, and as which text. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gateway.audit.chain import Line, read_line

_MAX_VALUES = 200  # characters


@dataclass(frozen=True, slots=True)
class Filter:
    """The entries to list. ``since`` is aware; ``action`` and ``actor`` are patterns with *. None: all."""

    since: datetime | None = None
    action: str | None = None
    actor: str | None = None

    def matches(self, line: Line) -> bool:
        """Return whether an entry is listed."""
        if self.since is not None and line.time < self.since:
            return False
        pairs = ((self.action, line.action), (self.actor, actor_text(line)))
        return all(pattern is None or fnmatchcase(text, pattern) for pattern, text in pairs)


def instant(text: str) -> datetime:
    """Return the time of a query, in UTC if it has no zone. Raises ValueError with a message for the client."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("since: expected a date such as 2027-01-31 or a time such as 2027-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def listed(lines: Iterable[tuple[str, bytes]], chosen: Filter, limit: int) -> Iterable[tuple[Line, bytes]]:
    """Return the last entries that are chosen, at most ``limit``. A line that is no entry is passed over."""
    last: deque[tuple[Line, bytes]] = deque(maxlen=limit)
    for _, data in lines:
        line = read_line(data)
        if line is not None and chosen.matches(line):
            last.append((line, data))
    return last


def actor_text(line: Line) -> str:
    """Return the actor as ``token ci``."""
    return f"{line.actor.get('kind', '')} {line.actor.get('name', '')}".strip()


def row(line: Line) -> str:
    """Return an entry as one line of text without control characters."""
    by = f"{actor_text(line)} ({line.origin})" if line.origin else actor_text(line)
    parts = [line.time.strftime("%Y-%m-%d %H:%M:%S"), line.action, line.target, by, _change(line.before, line.after)]
    return "  ".join(_printable(part) for part in parts if part)


def _change(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    return _values(after) if before is None else f"{_values(before)} -> {_values(after)}"


def _values(values: dict[str, Any] | None) -> str:
    if values is None:
        return ""
    text = msgspec.json.encode(values).decode()
    return text if len(text) <= _MAX_VALUES else f"{text[:_MAX_VALUES]}…"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text)
