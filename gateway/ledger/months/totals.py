"""Replace old rows by their totals.

The rule: a batch of rows is added to the totals and deleted in one transaction, so each request is counted once, whatever ends the process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, cast, delete, func, select

from gateway.ledger.months.tables import COST, GROUPS, SUMS, TOTALS
from gateway.ledger.schema import USAGE, utc
from gateway.ledger.statements import insert_into

HALF = 2**32
"""Costs are summed in two parts, because SQLite's integer sums overflow at 64 bits."""
# One gateway at a time replaces rows, until its transaction ends: otherwise two could count the same rows. In SQLite it is the writer.
_LOCKS = {"postgresql": "SELECT pg_advisory_xact_lock(1986817134)", "sqlite": "BEGIN IMMEDIATE"}


def sums_of_rows() -> dict[str, ColumnElement[Any]]:
    """Return the expressions of the sums over rows, by the names of ``SUMS`` and ``COST``."""
    usage = USAGE.c
    counts: dict[str, ColumnElement[Any]] = {
        "requests": func.count(),
        "incomplete": func.count(usage.incomplete),
        "estimated_requests": func.coalesce(func.sum(cast(usage.estimated, Integer)), 0),
        "cost_high": func.sum(usage.cost_nano // HALF),
        "cost_low": func.sum(usage.cost_nano % HALF),
    }
    return {name: counts[name] if name in counts else func.coalesce(func.sum(usage[name]), 0) for name in (*SUMS, *COST)}


def replace_by_totals(connection: Connection, before: datetime, most: int) -> int:
    """Replace the oldest rows before a time, at most ``most``, by their totals. Returns their number.

    The connection must have a transaction without a statement before this one.
    """
    dialect = connection.dialect.name
    connection.exec_driver_sql(_LOCKS[dialect])
    old = select(USAGE.c.request_id).where(USAGE.c.time < before).order_by(USAGE.c.time).limit(most)
    if not (ids := list(connection.execute(old).scalars())):
        return 0
    groups = [USAGE.c[name] for name in GROUPS]
    sums = [value.label(name) for name, value in sums_of_rows().items()]
    found = connection.execute(select(*groups, *sums).where(USAGE.c.request_id.in_(ids)).group_by(*groups)).mappings().all()
    insert = insert_into(TOTALS, dialect)
    added: dict[str, ColumnElement[Any]] = {name: TOTALS.c[name] + insert.excluded[name] for name in SUMS}
    for name in COST:
        old_part, new_part = TOTALS.c[name], insert.excluded[name]
        added[name] = func.coalesce(old_part + new_part, old_part, new_part)
    statement = insert.on_conflict_do_update(index_elements=[TOTALS.c.id], set_=added)
    connection.execute(statement, [{**_values(each), "id": _identity(each)} for each in found])
    connection.execute(delete(USAGE).where(USAGE.c.request_id.in_(ids)))
    return len(ids)


def _values(group: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: int(value) if name in COST and value is not None else value for name, value in group.items()}


def _identity(group: Mapping[Any, Any]) -> str:
    """Return the primary key of a group. NULL is a value of a group, and is not equal to itself in a database's unique index."""
    return hashlib.sha256(json.dumps([_text(group[name]) for name in GROUPS], sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> Any:
    if isinstance(value, datetime):
        return utc(value).isoformat()
    return value.isoformat() if isinstance(value, date) else value
