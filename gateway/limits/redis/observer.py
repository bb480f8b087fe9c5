"""Read what a store counts, and add what it has forgotten, for control.

The rules: reading changes nothing. Adding may be repeated, with more each time: the store remembers what was added.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from gateway.limits import windows
from gateway.limits.budget_holders import PeriodUse
from gateway.limits.decision import Holder
from gateway.limits.redis.store import RedisStore, encoded, parse_usage
from gateway.limits.states import HolderRates
from gateway.limits.windows import BudgetState

_AT_ONCE = 100
"""Holders of a command. The store serves no request meanwhile."""


class StoredCounts(NamedTuple):
    """The counts of a holder. ``is_restored``: they have the use from before the store counted."""

    rates: HolderRates
    budgets: Sequence[BudgetState]
    is_restored: bool


async def read_counts(store: RedisStore, holders: Sequence[Holder]) -> dict[str, StoredCounts]:
    """Return the counts of each holder by its name. Raises StoreUnavailableError."""
    found: dict[str, StoredCounts] = {}
    for start in range(0, len(holders), _AT_ONCE):
        some = holders[start : start + _AT_ONCE]
        parts = [encoded(each) for each in some]
        reply = await store.run(store.scripts["read"], [each.keys[0] for each in parts], [each.windows for each in parts])
        numbers, now = map(int, reply.split()), monotonic()
        for holder in some:
            is_restored = bool(next(numbers))
            rates = HolderRates(now + next(numbers) / 1000, now + next(numbers) / 1000, None)
            budgets = [state for usage in parse_usage(holder, numbers) for state in windows.states_of(*usage)]
            found[holder.name] = StoredCounts(rates, budgets, is_restored)
    return found


async def add_earlier_use(store: RedisStore, holder: Holder, used: PeriodUse) -> None:
    """Add what a holder used before the store counted. Raises StoreUnavailableError."""
    numbers = {window.name: number for number, window in enumerate(holder.windows, 1)}
    periods = ((numbers[name], period, *amounts) for (name, period), amounts in sorted(used.items()))
    parts = encoded(holder)
    await store.run(store.scripts["restore"], [parts.keys[0]], [parts.windows, *(" ".join(map(str, each)) for each in periods)])


async def upgrade_counts(store: RedisStore) -> None:
    """Upgrade what gateways of commit 3c1fad8 have counted. Raises StoreUnavailableError."""
    cursor = "0"
    while (cursor := (await store.run(store.scripts["upgrade"], [], [cursor])).decode()) != "0":
        pass
