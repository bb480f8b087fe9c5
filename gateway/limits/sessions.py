"""Find the counts of a session in a table of bounded size, which all workers share. Pure.

A client names the session of a request in the header ``x-session-id`` or in ``metadata.session_id``. The rules: the table never grows, and
no key fills it alone. The table has ``SETS`` sets of ``WAYS`` entries. The name of a holder selects ``SETS_OF_HOLDER`` of the sets, and the
session selects a single set. A new session replaces the least recently used entry of its set. An entry that was not used for ``IDLE``
seconds expires. So each holder has up to ``SETS_OF_HOLDER * WAYS`` sessions.

An entry has four cells: the number of the session, its tokens, its cost in nano-units, and when it was used last. A request stores the
number, so it does not change an entry that belongs to another session meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from upstream.cells import Cells

IDLE = 24 * 3600.0
SETS, SETS_OF_HOLDER, WAYS = 8192, 128, 8
CELLS_OF_ENTRY = 4
CELLS = SETS * WAYS * CELLS_OF_ENTRY

_LAST_USED = 3
_LARGEST_TIME = 1 << 40
"""Numbers of sessions are larger than any time in seconds, and smaller than 2**53, so that a float64 holds them exactly."""
_NAME = re.compile(r"[\w.:@/+=-]{1,64}", re.ASCII)


def session_of(headers: Mapping[bytes, bytes], document: Mapping[str, Any]) -> str | None:
    """Return the name of a request's session, or None.

    A long or unusual ID is replaced by its SHA-256, so that a name is always short and printable.
    """
    named: object = headers.get(b"x-session-id", b"").decode("latin-1")
    if not named:
        metadata = document.get("metadata")
        named = metadata.get("session_id") if isinstance(metadata, dict) else None
    if not isinstance(named, str) or not named:
        return None
    return named if _NAME.fullmatch(named) else f"sha256:{sha256(named.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


class Entry(NamedTuple):
    """The entry of a session: its number, its offset, and whether it replaced another session."""

    number: int
    offset: int
    evicted: bool


def find_entry(cells: Cells, table: int, holder: str, session: str, wall: float) -> Entry:
    """Return the entry of a session of a holder, and record its use at ``wall`` seconds since the epoch. ``table``: its first cell."""
    digest = sha256(f"{holder}\n{session}".encode()).digest()
    number = _LARGEST_TIME + int.from_bytes(digest[:6], "big")
    first = int.from_bytes(sha256(holder.encode()).digest()[:4], "big")
    chosen = (first + int.from_bytes(digest[6:8], "big") % SETS_OF_HOLDER) % SETS
    start = table + chosen * WAYS * CELLS_OF_ENTRY
    offsets = range(start, start + WAYS * CELLS_OF_ENTRY, CELLS_OF_ENTRY)
    offset = next((each for each in offsets if cells[each] == number), None)
    evicted = False
    if offset is None:
        offset = min(offsets, key=lambda each: cells[each + _LAST_USED])
        evicted = wall - cells[offset + _LAST_USED] < IDLE
    if cells[offset] != number or wall - cells[offset + _LAST_USED] >= IDLE:
        cells[offset], cells[offset + 1], cells[offset + 2] = number, 0.0, 0.0
    cells[offset + _LAST_USED] = wall
    return Entry(number, offset, evicted)
