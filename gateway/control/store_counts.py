"""Read what the limits store counts, for operators, and restore its budgets from the ledger.

The rules: operators see what key holders see, on each gateway and after each restart, because both are read from the store. Counts that
cannot be read are unknown, and never 0. The budgets of a store are the rows of the ledger from before the store began to count, and what it
has counted since. A store that was emptied has begun again. Each gateway may restore, because the store remembers what was added.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.limits.budget_holders import Budgets
from gateway.limits.decision import Holder
from gateway.limits.end_users import fixed_holders
from gateway.limits.redis.observer import StoredCounts, add_earlier_use, read_counts, upgrade_counts
from gateway.limits.redis.store import RedisStore, StoreUnavailableError
from gateway.limits.windows import BudgetState, moment, windows_of
from gateway.snapshot.snapshot import Allowance, Snapshot
from gateway.system.tasks import cancel, wait_at_most, wait_until

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger
    from gateway.usage.reader import UsageReader

_TICK, _INTERVAL = 0.25, 15.0  # seconds
_LONGEST_WAIT = 10.0  # seconds that workers wait for the first attempt
_ROWS_POLL = 0.02  # seconds
_log = logging.getLogger("vllm_gateway.control")


class StoreCounts:
    """The counts in the limits store of the current snapshot. ``ledger`` and ``reader`` are None if no ledger is configured."""

    def __init__(self, snapshot: Callable[[], Snapshot | None], ledger: Ledger | None, reader: UsageReader | None) -> None:
        self._snapshot = snapshot
        self._ledger = ledger
        self._reader = reader
        self._store: RedisStore | None = None
        self.known: Mapping[str, StoredCounts] = {}
        """The counts of each holder that were read last; without a holder whose counts are unknown."""
        self._due = asyncio.Event()
        self._attempted = asyncio.Event()
        self._is_first = self._may_have_more = True
        self._restored_at: float | None = None
        self._error: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # For operators

    async def refresh(self) -> None:
        """Read the counts now. They are unknown if the store does not respond."""
        known: Mapping[str, StoredCounts] = {}
        if self._store is not None:
            with suppress(StoreUnavailableError):
                known = await read_counts(self._store, list(self._holders().values()))
        self.known = known

    async def read(self, allowances: Iterable[Allowance]) -> Mapping[str, StoredCounts]:
        """Return the counts of some holders, also of keys of the store, by the holder's name. Empty if the store does not respond."""
        if self._store is None:
            return {}
        with suppress(StoreUnavailableError):
            return await read_counts(self._store, [_holder(each) for each in allowances])
        return {}

    async def earlier_users(self, snapshot: Snapshot) -> list[Allowance] | None:
        """Return the end users that the store may count, each with its own holder, as far as the ledger names them.

        None: rows of an earlier gateway are not in the database yet. Raises DatabaseUnavailableError.
        """
        budgets, at = Budgets(snapshot), moment(0.0, time.time())
        if self._reader is None or self._ledger is None or not budgets.counts_users:
            return []
        if self._ledger.has_earlier_rows:
            return None
        found = await self._reader.earlier_use(budgets, at.wall, at)
        return [replace(each.allowance, users=each.of_users.users) for each in found.values() if each.of_users is not None]

    def budgets(self) -> Iterator[tuple[str, BudgetState]]:
        """Yield each known budget of the configured keys and teams, with the name of its holder."""
        yield from ((name, state) for name, known in self.known.items() for state in known.budgets)

    def as_json(self) -> Mapping[str, Any] | None:
        """Return for /status whether the budgets are restored; None if there is nothing to restore."""
        if self._store is None or self._reader is None:
            return None
        return {"restored": self._restored_at is not None, "restored_at": self._restored_at, "last_error": self._error}

    # The tasks

    async def start(self, snapshot: Snapshot) -> None:
        """Start. With a store, wait for the first attempt to read it and to restore its budgets, up to a timeout."""
        self._tasks = [asyncio.create_task(work, name="store-counts") for work in (self._tick(), self._run())]
        if snapshot.uses_store:
            await wait_at_most(_LONGEST_WAIT, self._attempted.wait())

    async def aclose(self) -> None:
        """Stop, and close the connection to the store."""
        await cancel(*self._tasks)
        if self._store is not None:
            self._store.close()

    async def _tick(self) -> None:
        while True:
            self._follow()
            if self._store is not None:
                self._store.tick()
            await asyncio.sleep(_TICK)

    def _follow(self) -> None:
        """Use the store of the current snapshot."""
        snapshot = self._snapshot()
        settings = snapshot.limits_store if snapshot is not None and snapshot.uses_store else None
        if self._store is not None and settings is not None and self._store.settings.counts == settings.counts:
            self._store.settings = settings
            return
        if self._store is not None:
            self._store.close()
            self._store, self.known = None, {}
        if settings is not None:
            self._store = RedisStore(settings, f"control {token_hex(8)}", self._store_changed, is_quiet=True)
            self._is_first, self._restored_at = True, None
            self._due.set()

    def _store_changed(self, error: str | None) -> None:
        if error is None:
            self._due.set()
        else:
            self.known = {}

    async def _run(self) -> None:
        while True:
            await wait_at_most(_INTERVAL, self._due.wait())
            self._due.clear()
            try:
                await self._poll()
            except (StoreUnavailableError, DatabaseUnavailableError) as error:
                self._error = str(error) or "the limits store does not respond"
            except Exception as error:  # noqa: BLE001  the outer edge: the next attempt may succeed
                _log.exception("the budgets in the limits store could not be restored; this is retried")
                self._error = str(error)
            if self._store is not None:
                self._attempted.set()

    async def _poll(self) -> None:
        await self.refresh()
        if self._is_first and self._store is not None and self._store.has_just_begun:
            await upgrade_counts(self._store)
            await self.refresh()
        store, snapshot, ledger, reader = self._store, self._snapshot(), self._ledger, self._reader
        if store is None or snapshot is None or ledger is None or reader is None or not self.known:
            return
        missing = [name for name, known in self.known.items() if not known.is_restored]
        if missing or self._may_have_more:
            await wait_until(lambda: not ledger.has_earlier_rows or ledger.unavailable is not None, _ROWS_POLL)
            await self._restore(store, snapshot, reader, missing)
            await self.refresh()
        self._restored_at, self._error, self._is_first = self._restored_at or time.time(), None, False

    # Restore

    async def _restore(self, store: RedisStore, snapshot: Snapshot, reader: UsageReader, missing: Sequence[str]) -> None:
        """Add what was used before the store began to count. Raises StoreUnavailableError and DatabaseUnavailableError."""
        found = await reader.earlier_use(Budgets(snapshot), store.since, moment(0.0, time.time()))
        for one in found.values():
            await add_earlier_use(store, _holder(one.allowance), one.used)
        holders = self._holders()
        for name in missing:
            if name not in found:
                await add_earlier_use(store, holders[name], {})  # marks it as restored
        if missing and found:
            _log.warning("the limits store had no budgets: the ledger has restored the budgets of %d keys and teams", len(found))
        self._may_have_more = bool(missing)  # rows that other gateways deliver meanwhile

    def _holders(self) -> dict[str, Holder]:
        """Return the configured holders with counts, by their names."""
        if (snapshot := self._snapshot()) is None:
            return {}
        allowances = (*(each for key in snapshot.keys for each in key.allowances), *(each for of in snapshot.teams.values() for each in of))
        return {each.holder: _holder(each) for some in allowances for each in fixed_holders(some)}


def _holder(allowance: Allowance) -> Holder:
    """Return a holder in the form of a store, which does not use the offsets of rolling windows."""
    return Holder.placed(allowance.holder, allowance.limits, 0, {window.name: 0 for window in windows_of(allowance.limits)})
