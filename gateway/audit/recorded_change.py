"""A change of the store with its entry in the audit log.

The rule: the entry is durable before the commit, so there is no change without an entry. If the database does not confirm the change,
another entry says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gateway.audit.entry import Audit, Entry
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.store.service import CHANGE_TIMEOUT, KeyService, Store

T = TypeVar("T")


async def recorded_change(
    store: Store,
    audit: Audit,
    work: Callable[[KeyService], T],
    entry_of: Callable[[T], Entry | None],
    seconds: float = CHANGE_TIMEOUT,
) -> T:
    """Run a change, and record its entry. ``entry_of`` returns None if nothing was changed.

    Raises RefusedChangeError, AuditUnavailableError, and then nothing was changed, and DatabaseUnavailableError, also after ``seconds``.
    """
    recorded: list[Entry] = []

    def record(done: T) -> None:
        if (entry := entry_of(done)) is not None:
            audit.record(entry)
            recorded.append(entry)

    try:
        return await store.change(work, record, seconds)
    except DatabaseUnavailableError as error:
        for entry in recorded:
            unconfirmed = replace(entry, action=f"{entry.action}.unconfirmed", after={"reason": str(error)})
            await asyncio.to_thread(audit.record_refused, unconfirmed)
        raise
