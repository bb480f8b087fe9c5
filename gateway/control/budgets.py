"""Restore budgets from the ledger, because counts in memory do not survive the gateway.

The rules: a request counts once. Rows from before the start are restored. Later rows belong to the running workers, which have counted
them. The rows that an earlier gateway left on disk are written to the database before its sums are used. Later rows are added with the next
sums. Workers start after the first attempt, so no request meets empty counts while the database responds. An unavailable database delays no
request: the counts then start at zero, and the earlier use is added as soon as the database responds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.limits.budget_holders import Budgets, HolderUse, PeriodUse, beyond
from gateway.limits.decision import Holder
from gateway.limits.end_users import other_users, owner_of
from gateway.limits.key_limits import PART_FOR_SUBJECTS
from gateway.limits.shared_counts import Buckets, BucketsFullError
from gateway.limits.user_table import UserTable
from gateway.limits.windows import moment
from gateway.snapshot.snapshot import Allowance, Snapshot
from gateway.system.tasks import cancel, wait_at_most, wait_until
from upstream.backoff import Backoff

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger
    from gateway.usage.reader import UsageReader

_LONGEST_WAIT = 10.0  # seconds that workers wait for the first attempt
_FIRST_POLL, _POLL = 0.02, 1.0  # seconds between two polls of the ledger, before and after the workers start
_PAUSES = 1.0, 60.0  # seconds before a failed query is tried again, at first and at most
_HOLDERS_PER_ITERATION = 500  # restored in one iteration of the event loop
_log = logging.getLogger("vllm_gateway.control")


@dataclass(eq=False, slots=True)
class BudgetRestorer:
    """Restores the budgets of a gateway that started at ``before``, in seconds since the epoch.

    ``ledger`` and ``reader`` are None if no ledger is configured. ``clock`` returns seconds since the epoch.
    """

    _ledger: Ledger | None
    _reader: UsageReader | None
    _buckets: Buckets
    _before: float
    clock: Callable[[], float] = time.time
    _added: dict[str, PeriodUse] = field(default_factory=dict)  # by the name of the holder
    _tables: dict[str, UserTable] = field(default_factory=dict)  # of end users, by their holder
    _attempted: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _restored_at: float | None = None
    _error: str | None = None

    async def start(self, snapshot: Snapshot) -> None:
        """Start to restore the limits of a snapshot. Waits for the first attempt to finish, up to a timeout."""
        budgets = Budgets(snapshot)
        if self._ledger is None or self._reader is None or snapshot.uses_store or not budgets:
            return
        self._task = asyncio.create_task(self._run(self._ledger, self._reader, budgets), name="budgets")
        await wait_at_most(_LONGEST_WAIT, self._attempted.wait())
        if self._restored_at is None:
            why = self._error or "the ledger's database has not responded yet"
            _log.warning("budgets are not restored yet: requests are counted from zero until the ledger's database responds (%s)", why)

    def as_json(self) -> Mapping[str, Any] | None:
        """Return the state for /status; None if there is nothing to restore."""
        if self._task is None:
            return None
        return {"restored": self._restored_at is not None, "restored_at": self._restored_at, "last_error": self._error}

    async def aclose(self) -> None:
        """Stop restoring."""
        if self._task is not None:
            await cancel(self._task)

    async def _run(self, ledger: Ledger, reader: UsageReader, budgets: Budgets) -> None:
        """Restore once the rows of former gateways are in the database, and again when more rows have arrived."""
        summed, backoff = -1, Backoff(*_PAUSES)
        while True:
            deliveries = ledger.earlier_deliveries  # read first: a file that is delivered meanwhile changes it
            if ledger.has_earlier_rows or deliveries == summed:
                if ledger.unavailable is not None and self._restored_at is None:  # the rows cannot be delivered now: let the workers start
                    self._error = ledger.unavailable
                    self._attempted.set()
                await asyncio.sleep(_POLL if self._attempted.is_set() else _FIRST_POLL)
                continue
            try:
                await self._restore(reader, budgets)
            except DatabaseUnavailableError as error:
                self._error = str(error)
                self._attempted.set()
                await asyncio.sleep(backoff.next_pause())
            except Exception as error:  # noqa: BLE001  the outer edge: the next attempt may succeed
                _log.exception("the budgets could not be restored; this is retried")
                self._error = str(error)
                self._attempted.set()
                await asyncio.sleep(_PAUSES[1])
            else:
                summed = deliveries
                backoff.reset()

    async def _restore(self, reader: UsageReader, budgets: Budgets) -> None:
        """Add the use from before the start to the counts, as far as it was not added yet. Raises DatabaseUnavailableError."""
        found = await reader.earlier_use(budgets, self._before, moment(0.0, self.clock()))
        self._buckets.announce_writes()
        try:
            await wait_until(lambda: self._buckets.may_write, _FIRST_POLL)
            for number, (name, one) in enumerate(found.items(), 1):
                self._add(name, one)
                if number % _HOLDERS_PER_ITERATION == 0:
                    await asyncio.sleep(0)
        finally:
            self._buckets.end_writes()
        if self._restored_at is None:
            late = " The workers have counted from zero until now." if self._attempted.is_set() else ""
            _log.info("the ledger has restored the budgets of %d keys and teams.%s", len(found), late)
        self._restored_at, self._error = self.clock(), None
        self._attempted.set()

    def _add(self, name: str, one: HolderUse) -> None:
        added = self._added.setdefault(name, {})
        if more := beyond(one.used, added):
            self._buckets.add_earlier_use(self._holder(one), more)
            added.update({period: one.used[period] for period in more})

    def _holder(self, one: HolderUse) -> Holder:
        """Return the holder in the form of the workers: a subject without space for separate counts uses the counts of its entry."""
        own = one.allowance
        if one.of_users is not None and one.end_user is not None:
            return self._holder_of_user(one.of_users, one.end_user)
        if one.entry is None:
            return self._buckets.holder(own.holder, own.limits)
        try:
            return self._buckets.holder(own.holder, own.limits, PART_FOR_SUBJECTS)
        except BucketsFullError:
            return self._buckets.holder(one.entry.holder, one.entry.limits)

    def _holder_of_user(self, limits: Allowance, name: str) -> Holder:
        """Return the holder of an end user, or the holder that all end users beyond the bound share."""
        try:
            table = self._tables.get(limits.holder) or UserTable(self._buckets, limits, PART_FOR_SUBJECTS)
        except BucketsFullError:
            placed = None
        else:
            self._tables[limits.holder] = table
            placed = table.allocate(name, moment(time.monotonic(), self.clock()))
        return placed or self._buckets.holder(other_users(owner_of(limits.holder)), limits.limits)
