"""Sum the rows of the requests before a start, for the limits that count their tokens and cost.

The rules: a request has one row, even if it arrived several times, so it counts once. Rows since the start are the running gateway's own,
which its limits have counted already. A query has a bounded time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Engine, Select, case, func, inspect, or_, select

from gateway.ledger.schema import USAGE
from gateway.limits.budget_holders import Budgets, UsedSince
from gateway.usage.database import time_limited
from gateway.usage.queries import cost_parts, subjects_of, summed_cost

_MOST_STARTS = 100  # of periods and slices in one query
_MOST_NAMES = 500  # more keys and teams are not named in the query, which then reads all rows of the time


def earlier_use(engine: Engine, budgets: Budgets, starts: Sequence[float], before: float, seconds: float) -> list[UsedSince]:
    """Return the sums of the rows before a time, by key, team, model and the last of ``starts`` that is not after them.

    ``starts`` are sorted; like ``before`` they are in seconds since the epoch. ``seconds`` is the maximum duration of
    each query. Raises DatabaseUnavailableError.
    """
    known = [start for start in starts if start < before]
    found: list[UsedSince] = []
    for first in range(0, len(known), _MOST_STARTS):
        part = known[first : first + _MOST_STARTS]
        end = known[first + _MOST_STARTS] if first + _MOST_STARTS < len(known) else before
        found += (row._replace(slot=first + row.slot) for row in _sums(engine, budgets, part, end, seconds))
    return found


def _sums(engine: Engine, budgets: Budgets, starts: Sequence[float], before: float, seconds: float) -> Iterator[UsedSince]:
    moments = [datetime.fromtimestamp(start, UTC) for start in starts]
    slot = case(*((USAGE.c.time >= moment, number) for number, moment in reversed([*enumerate(moments)])), else_=-1).label("slot")
    tokens = func.coalesce(USAGE.c.prompt_tokens, 0) + func.coalesce(USAGE.c.completion_tokens, 0)
    holder: tuple[ColumnElement[Any], ...] = (
        USAGE.c.key,
        USAGE.c.team,
        USAGE.c.model,
        *([USAGE.c.end_user] if budgets.counts_users else []),
    )
    statement: Select[Any] = (
        select(*holder, slot, func.sum(tokens).label("tokens"), *cost_parts())
        .where(USAGE.c.time >= moments[0], USAGE.c.time < datetime.fromtimestamp(before, UTC), *_holders(budgets))
        .group_by(*holder, "slot")
    )
    with time_limited(engine, seconds) as connection:
        if not inspect(connection).has_table(USAGE.name):
            return
        rows = connection.execute(statement).all()
    for row in rows:
        user = row.end_user if budgets.counts_users else None
        yield UsedSince(row.key, row.team, row.model, row.slot, int(row.tokens or 0), summed_cost(row) or 0, user)


def _holders(budgets: Budgets) -> list[ColumnElement[bool]]:
    """Return the condition that a row may count for a budget."""
    if len(budgets.keys) + len(budgets.teams) > _MOST_NAMES:
        return []
    of_entries = [subjects_of(entry) for entry in sorted(budgets.entries)]
    return [or_(USAGE.c.key.in_(sorted(budgets.keys)), USAGE.c.team.in_(sorted(budgets.teams)), *of_entries)]
