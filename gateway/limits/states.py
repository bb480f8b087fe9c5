"""Describe the state of limits for key holders and operators: how much is used, what remains, and when all is available again. Pure.

The rule: the numbers are those that refusals and headers use, from ``decision.bucket_state`` and ``windows.BudgetState``. A number that is
not counted here is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gateway.limits.decision import RATES, Holder, bucket_state
from gateway.limits.windows import BudgetState, ExceededLimit, session_window, windows_of
from gateway.snapshot.money import json_number
from gateway.snapshot.snapshot import Allowance, Limits, Raised


class HolderRates(NamedTuple):
    """The counts of a holder that are not budgets: when its buckets of requests and tokens are full, and its requests in flight.

    ``in_flight`` is None if a store counts them.
    """

    requests_full: float
    tokens_full: float
    in_flight: int | None


class StoreResult(NamedTuple):
    """Result of an admission or a read by the store.

    It has the holder and limit that refuse it, if any, when the buckets of each holder are full, and the state of each budget.
    """

    exceeded: tuple[Holder, ExceededLimit] | None
    full_times: Sequence[tuple[Limits, float, float]]
    budgets: Sequence[tuple[Holder, BudgetState]] = ()
    evicted: int = 0
    """Sessions that the store has forgotten for a new one."""


class LimitState(NamedTuple):
    """State of one limit. ``limit`` is its name in the configuration, ``reset`` is in seconds, a cost is in nano-units.

    ``models`` are the globs of the models that share it, None for all models.
    """

    holder: str
    models: tuple[str, ...] | None
    limit: str
    amount: int
    used: int | None = None
    remaining: int | None = None
    reset: float | None = None
    soft: bool = False
    raised: Raised | None = None
    """The raise that is in force, of a limit that is raised for a time."""

    @property
    def share(self) -> float:
        """The used share, 0 if it is unknown."""
        return (self.used or 0) / (self.amount or 1)

    def document(self) -> dict[str, Any]:
        """Return the state as JSON, for an encoder of msgspec. A cost is a number with all of its digits."""
        is_cost = self.limit.startswith("cost")
        raised: dict[str, Any] = {}
        if self.raised is not None:
            configured, until = self.raised.configured, datetime.fromtimestamp(self.raised.until, UTC)
            raised = {
                "configured": json_number(configured) if is_cost else configured,
                "raised_until": until.isoformat().replace("+00:00", "Z"),
            }
        amounts = {"amount": self.amount, "used": self.used, "remaining": self.remaining}
        return {
            "holder": self.holder,
            "models": self.models,
            "limit": self.limit,
            **{name: json_number(value) if is_cost and value is not None else value for name, value in amounts.items()},
            "reset_seconds": None if self.reset is None else round(self.reset, 3),
            "soft": self.soft,
            **raised,
        }


def budget_state(holder: str, models: tuple[str, ...] | None, state: BudgetState) -> LimitState:
    """Return the state of a budget of a holder."""
    budget = state.budget
    return LimitState(holder, models, budget.name, int(budget.limit), int(state.used), int(state.remaining), state.reset, budget.soft)


def limit_states(
    allowance: Allowance, rates: HolderRates | None, budgets: Iterable[BudgetState] | None, now: float
) -> Iterator[LimitState]:
    """Yield the state of each limit of a holder. ``rates`` and ``budgets`` are None if they are unknown; ``now`` is monotonic."""
    raised = {each.limit: each for each in allowance.limits.raised}
    for state in _limit_states(allowance, rates, budgets, now):
        yield state._replace(raised=raised[state.limit]) if state.limit in raised and not state.soft else state


def _limit_states(
    allowance: Allowance, rates: HolderRates | None, budgets: Iterable[BudgetState] | None, now: float
) -> Iterator[LimitState]:
    limits, holder, models = allowance.limits, allowance.holder.partition(" for ")[0], allowance.models
    full_times = (None, None) if rates is None else (rates.requests_full, rates.tokens_full)
    for name, limit, full in zip(RATES, (limits.requests_per_minute, limits.tokens_per_minute), full_times, strict=False):
        if limit is not None and full is None:
            yield LimitState(holder, models, name, limit)
        elif limit is not None and full is not None:
            bucket = bucket_state(limit, full, now)
            yield LimitState(holder, models, name, limit, limit - bucket.remaining, bucket.remaining, bucket.reset)
    if limits.concurrent is not None:
        used = None if rates is None else rates.in_flight
        left = None if used is None else max(limits.concurrent - used, 0)
        yield LimitState(holder, models, "concurrent", limits.concurrent, used, left)
    if budgets is None:
        for budget in (each for window in windows_of(limits) for each in window.budgets):
            yield LimitState(holder, models, budget.name, int(budget.limit), soft=budget.soft)
    for state in budgets or ():
        yield budget_state(holder, models, state)
    if limits.session is not None:
        for budget in session_window(limits.session, 0).budgets:
            yield LimitState(holder, models, budget.name, int(budget.limit))  # for each session, so nothing is used of it as a whole
    if limits.max_tokens is not None:
        yield LimitState(holder, models, "max_tokens", limits.max_tokens)
