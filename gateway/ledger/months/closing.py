"""Close a month: freeze the report of its rows, and mark the rows that arrive later.

The rules: a closed month never changes. A row that is stored after its month was closed has the time in ``late``, and is a correction. The
mark of a month is written before its rows are summed. A writer sees the mark, or has committed its rows before it. So each row is in the
report or is a correction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, Table, func, insert, inspect, select, union_all, update

from gateway.ledger.errors import MonthError
from gateway.ledger.months.tables import CLOSED, COST, MONTHS, SUMS, TOTALS
from gateway.ledger.months.totals import HALF, sums_of_rows
from gateway.ledger.row import UNBILLED_KEYS, UsageRow
from gateway.ledger.schema import USAGE, utc
from gateway.ledger.statements import batches, insert_into
from gateway.snapshot.money import decimal_text

LINE = ("key", "team", "model", "labels")
"""The columns by which a closed month has a line."""
_COUNTS = {name: "estimated" if name == "estimated_requests" else name for name in SUMS}
_DAY = 86400
_LOCK = 1986817135  # the class of PostgreSQL's advisory locks of months; arbitrary but unique to this project
_BATCH = 1000  # lines of a statement


@dataclass(frozen=True, slots=True)
class ClosedMonth:
    """A closed month. ``lines`` and ``corrections`` are JSON objects as texts; ``hash`` is the SHA-256 of the lines, each with a newline.

    A correction also has ``late``: the time at which its rows were stored. The month is ``intact`` if its lines still have this hash.
    """

    month: str
    closed: datetime
    hash: str
    lines: Sequence[str]
    corrections: Sequence[str] = ()

    @property
    def is_intact(self) -> bool:
        return hash_of(self.lines) == self.hash


def hash_of(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines, in hexadecimal: what ``sha256sum`` prints for a file with them."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def month_of(text: str) -> tuple[date, date]:
    """Return the first day of a month such as ``2026-10``, and the first day after it. Raises MonthError."""
    try:
        if len(text) != len("2026-10"):
            raise ValueError
        first = date.fromisoformat(f"{text}-01")
        return first, (first + timedelta(days=31)).replace(day=1)
    except (ValueError, OverflowError):
        raise MonthError(f"{text} is not a month: use the form 2026-10") from None


# The writer's side


def mark_late(connection: Connection, rows: Sequence[UsageRow], now: float) -> None:
    """Set ``late`` of the rows whose month is closed. Until the transaction ends, no month of these rows can be closed."""
    if not (months := sorted({_month_of(day) for day in {int(row.started // _DAY) for row in rows}})):
        return
    _hold(connection, months, shared=True)
    closed = {month for (month,) in connection.execute(select(MONTHS.c.month).where(MONTHS.c.month.in_(months)))}
    for row in rows:
        row.late = now if closed and _month_of(int(row.started // _DAY)) in closed else None


def _month_of(day: int) -> str:
    """Return the month of a day since the epoch. Time is not limited to years that a date can have, because rows are not either."""
    try:
        return (date(1970, 1, 1) + timedelta(days=day)).isoformat()[:7]
    except OverflowError:
        return ""


def _hold(connection: Connection, months: Iterable[str], *, shared: bool) -> None:
    """Lock months until the transaction ends; in SQLite, start to write."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return
    function = f"pg_advisory_xact_lock{'_shared' if shared else ''}"
    for month in months:
        number = int(month.replace("-", "") or 0)
        connection.exec_driver_sql(f"SELECT {function}({_LOCK}, {number})")


# Closing


def close_month(engine: Engine, month: str, now: datetime) -> ClosedMonth:
    """Close a month, or return it if it is closed. ``now`` is aware. Raises MonthError and SQLAlchemyError."""
    _, end = month_of(month)
    if datetime(end.year, end.month, end.day, tzinfo=UTC) > now:
        raise MonthError(f"{month} has not ended: a month can be closed from {end} on, UTC")
    with engine.begin() as connection:
        if not inspect(connection).has_table(MONTHS.name):
            raise MonthError("the ledger's tables are of an earlier version; start the gateway first")
    with engine.begin() as connection:
        _hold(connection, [month], shared=False)
        connection.execute(insert_into(MONTHS, connection.dialect.name).values(month=month, closed=now).on_conflict_do_nothing())
    if (found := read_month(engine, month)) is not None:
        return found
    lines = _summed(engine, month, late=False)
    with engine.begin() as connection:
        _hold(connection, [month], shared=False)
        if connection.execute(select(MONTHS.c.hash).where(MONTHS.c.month == month)).scalar() is None:  # else another gateway was faster
            for some in batches([{"month": month, "number": number, "line": line} for number, line in enumerate(lines)]):
                connection.execute(insert(CLOSED), some)
            connection.execute(update(MONTHS).where(MONTHS.c.month == month).values(hash=hash_of(lines)))
    found = read_month(engine, month)
    assert found is not None, "it was stored above"
    return found


def read_month(engine: Engine, month: str) -> ClosedMonth | None:
    """Return a closed month with its corrections; None if it is not closed. Raises MonthError and SQLAlchemyError."""
    month_of(month)
    with engine.connect() as connection:
        if not inspect(connection).has_table(MONTHS.name):
            return None
        known = connection.execute(select(MONTHS.c.closed, MONTHS.c.hash).where(MONTHS.c.month == month)).one_or_none()
        if known is None or known.hash is None:
            return None
        lines = connection.execute(select(CLOSED.c.line).where(CLOSED.c.month == month).order_by(CLOSED.c.number)).scalars().all()
    return ClosedMonth(month, utc(known.closed), known.hash, lines, _summed(engine, month, late=True))


def closed_months(engine: Engine) -> list[tuple[str, datetime, str]]:
    """Return the closed months in order, each with the time at which it was closed and its hash. Raises SQLAlchemyError."""
    with engine.connect() as connection:
        if not inspect(connection).has_table(MONTHS.name):
            return []
        found = connection.execute(select(MONTHS).where(MONTHS.c.hash.is_not(None)).order_by(MONTHS.c.month)).all()
    return [(each.month, utc(each.closed), each.hash) for each in found]


def _summed(engine: Engine, month: str, *, late: bool) -> list[str]:
    """Return the lines of a month in the order of their groups: of its rows and totals, or of those that arrived late.

    Copies of requests are not counted.
    """
    names = (*LINE, "late") if late else LINE
    statement = union_all(
        select(*(USAGE.c[name] for name in names), *(value.label(name) for name, value in sums_of_rows().items()))
        .where(*_of_month(USAGE, month, late=late))
        .group_by(*(USAGE.c[name] for name in names)),
        select(*(TOTALS.c[name] for name in names), *(func.sum(TOTALS.c[name]).label(name) for name in (*SUMS, *COST)))
        .where(*_of_month(TOTALS, month, late=late))
        .group_by(*(TOTALS.c[name] for name in names)),
    )  # one statement, so that it sees each row once, also while rows are replaced by totals
    summed: dict[str, dict[str, Any]] = {}
    with engine.connect() as connection:
        for row in connection.execution_options(yield_per=_BATCH).execute(statement):
            group = {name: _plain(getattr(row, name)) for name in names}
            total = summed.setdefault(json.dumps(group, sort_keys=True), {**group, **dict.fromkeys(SUMS, 0), "nano": None})
            _add(total, row)
    return [_line(summed[group], names) for group in sorted(summed)]


def _of_month(table: Table, month: str, *, late: bool) -> list[ColumnElement[bool]]:
    first, end = month_of(month)
    columns = table.c
    conditions = [columns.day >= first, columns.day < end, columns.key.not_in(UNBILLED_KEYS)]
    if late:
        return [*conditions, columns.late.is_not(None)]
    if table is USAGE:  # the day is that of the time, which has an index
        bounds = [datetime(day.year, day.month, day.day, tzinfo=UTC) for day in (first, end)]
        conditions += [columns.time >= bounds[0], columns.time < bounds[1]]
    return [*conditions, columns.late.is_(None)]


def _plain(value: Any) -> Any:
    return utc(value).isoformat() if isinstance(value, datetime) else value


def _add(total: dict[str, Any], row: Row[Any]) -> None:
    for name in SUMS:
        total[name] += int(getattr(row, name))
    if row.cost_high is not None:
        total["nano"] = (total["nano"] or 0) + int(row.cost_high) * HALF + int(row.cost_low)


def _line(total: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the canonical text of a line: its fields in the order of their names, without spaces. A cost is a text with all digits."""
    cost = None if total["nano"] is None else decimal_text(total["nano"])
    document = {name: total[name] for name in names} | {shown: total[name] for name, shown in _COUNTS.items()} | {"cost": cost}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
