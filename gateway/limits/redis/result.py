"""The result of an admission or a read by the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.limits.rules import Holder
from gateway.limits.windows import BudgetState, ExceededLimit
from gateway.snapshot.snapshot import Limits


class StoreResult(NamedTuple):
    """Result of an admission.

    It has the holder and limit that refuse it, if any, when the buckets of each holder are full, and the state of each budget.
    """

    exceeded: tuple[Holder, ExceededLimit] | None
    full_times: Sequence[tuple[Limits, float, float]]
    budgets: Sequence[tuple[Holder, BudgetState]] = ()
    evicted: int = 0
    """Sessions that the store has forgotten for a new one."""


OnResult = Callable[[StoreResult | None, float, float], None]
"""Called with a result, None if nothing was reserved, the ``monotonic`` time of the command, and the store's time, since the epoch."""
