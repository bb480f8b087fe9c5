"""Find out at the start whether the last change of the store that the audit log has was made.

The rule: the entry of a change is durable before its commit. If control was killed in between, there is an entry without a change, and at
most one, because a gateway makes one change at a time. Then another entry says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

from gateway.access.actor import Actor
from gateway.audit.chain import Line
from gateway.audit.entry import Entry
from gateway.audit.log import AuditLog
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.store.database import KeyDatabase
from gateway.store.entries import Kind
from gateway.usage.database import run_in_thread

_TIMEOUT, _PAUSE = 10.0, 5.0  # seconds
_ANY = 2**63 - 1
_REASON = "the gateway ended before the database confirmed the change, which was not made"


async def check_last_change(audit: AuditLog, database: KeyDatabase) -> None:
    """Record an entry if the last recorded change was not made. Waits for the database."""
    while True:
        try:
            found = await run_in_thread(lambda: _unconfirmed(audit, database), _TIMEOUT)
        except DatabaseUnavailableError:
            await asyncio.sleep(_PAUSE)
            continue
        if found is not None:
            entry = Entry(f"{found.action}.unconfirmed", Actor("gateway", "", None), "", found.target, found.before, {"reason": _REASON})
            await asyncio.to_thread(audit.record_refused, entry)
        return


def _unconfirmed(audit: AuditLog, database: KeyDatabase) -> Line | None:
    """Return the last recorded change if it was not made. Raises DatabaseUnavailableError."""
    line = next(_changes(audit.before_start()), None)
    if line is None or line.action.endswith(".unconfirmed"):
        return None
    kind = cast(Kind, line.action.partition(".")[0])
    if line.after is None:  # a deletion
        first, last = int((line.before or {}).get("version", 0)) + 1, _ANY
    else:
        first = last = int(line.after.get("version", 0))
    added = (line.after or {}).get("added") or [line.target]
    return None if not first or database.has_change(kind, str(added[0]), first, last) else line


def _changes(lines: Iterator[Line]) -> Iterator[Line]:
    """Yield the entries about changes of the store."""
    return (line for line in lines if line.action.startswith(("key.", "team.")) and not line.action.endswith(".refused"))
