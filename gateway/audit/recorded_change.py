"""A change with its entry in the audit log.

The rule: the entry is durable before the commit, so there is no change without an entry. If the database does not confirm the change,
another entry says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from gateway.audit.entry import Audit, Entry
from gateway.ledger.errors import DatabaseUnavailableError

T = TypeVar("T")
Change = Callable[[Callable[[T], None]], Awaitable[T]]
"""Makes a change. It passes the result to the given function before the commit, on a thread."""


async def recorded_change(audit: Audit, change: Change[T], entry_of: Callable[[T], Entry | None]) -> T:
    """Make a change, and record its entry. ``entry_of`` returns None if nothing was changed.

    Raises AuditUnavailableError, and then nothing was changed, and what ``change`` raises, such as DatabaseUnavailableError.
    """
    recorded: list[Entry] = []

    def record(done: T) -> None:
        if (entry := entry_of(done)) is not None:
            audit.record(entry)
            recorded.append(entry)

    try:
        return await change(record)
    except DatabaseUnavailableError as error:
        for entry in recorded:
            unconfirmed = replace(entry, action=f"{entry.action}.unconfirmed", after={"reason": str(error)})
            await asyncio.to_thread(audit.record_refused, unconfirmed)
        raise
