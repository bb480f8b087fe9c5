"""Follow the revoked sessions in the database, which other gateways change too.

The rules: the last known IDs are used while the database is away. Before the first successful read they are unknown, and no session is
valid: a session that was revoked must not become valid by a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.sign_in.people import PeopleStore
from gateway.usage.database import run_in_thread

_INTERVAL = 0.5  # seconds between two reads
_TIMEOUT = 10.0
_PRUNE_EVERY = 600.0  # seconds
_log = logging.getLogger("vllm_gateway.control")


class Revocations:
    """The revoked sessions as this gateway knows them. ``on_change`` is called when they have changed, and may not wait."""

    def __init__(self, people: PeopleStore, on_change: Callable[[], None]) -> None:
        self._people = people
        self._on_change = on_change
        self._problem = ""
        self._pruned = time.monotonic()
        self._reading = asyncio.Lock()  # an older result must not replace a newer one
        self.known: tuple[str, ...] | None = None
        """The IDs; None before the first successful read."""

    async def run(self) -> None:
        """Read the IDs until the end, a few times a second."""
        while True:
            await self.refresh()
            if time.monotonic() - self._pruned > _PRUNE_EVERY:
                self._pruned = time.monotonic()
                await self._prune()
            await asyncio.sleep(_INTERVAL)

    async def refresh(self) -> None:
        """Read the IDs now."""
        async with self._reading:
            try:
                found = await run_in_thread(lambda: self._people.revoked(time.time()), _TIMEOUT)
            except DatabaseUnavailableError as error:
                self._report(str(error))
                return
            self._report("")
            if found != self.known:
                self.known = found
                self._on_change()

    async def _prune(self) -> None:
        try:
            await run_in_thread(lambda: self._people.prune(time.time()), _TIMEOUT)
        except DatabaseUnavailableError as error:
            self._report(str(error))

    def _report(self, problem: str) -> None:
        if problem and not self._problem:
            state = "the last known ones stay in use" if self.known is not None else "no session is valid until they are known"
            _log.warning("the revoked sessions cannot be read: %s; %s", problem, state)
        elif self._problem and not problem:
            _log.warning("the revoked sessions can be read again")
        self._problem = problem
