"""Prepare the insertion of rows: the statement, and the rows' values as the database's driver needs them.

The rules: the values are passed directly to the driver, because SQLAlchemy's handling of parameters costs as much as SQLite does. They are
converted column by column, and what can be known for a whole column is not done for each row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any

from msgspec.structs import astuple
from sqlalchemy import Dialect

from gateway.ledger.column import Kind
from gateway.ledger.row import COLUMNS, NULLABLE, UsageRow
from gateway.ledger.schema import USAGE
from gateway.ledger.statements import insert_into

_NULL = math.nan
"""SQLite stores NaN as NULL (sqlite.org/floatingpoint.html)."""
_FLAGS = frozenset(column.name for column in COLUMNS if column.kind in (Kind.FLAG, Kind.IS_GIVEN))
_STATEMENTS = 64  # statements in memory; most batches need the same


class Insertion:
    """The insert statements of a database, and the conversion of the values."""

    def __init__(self, dialect: Dialect) -> None:
        self._is_sqlite = dialect.name == "sqlite"
        insert = insert_into(USAGE, dialect.name).on_conflict_do_nothing()
        self._start = start_as_text if self._is_sqlite else _start_as_datetime
        self._json = USAGE.c.labels.type.dialect_impl(dialect).bind_processor(dialect) or json.dumps
        self._statement = lru_cache(_STATEMENTS)(lambda names: str(insert.compile(dialect=dialect, column_keys=names)))

    def prepare(self, rows: Sequence[UsageRow]) -> tuple[str, list[tuple[Any, ...]]]:
        """Return the statement for these rows, at least one, and their values.

        Raises ValueError and OverflowError for a value that the database cannot store.
        """
        columns = _columns(rows, self._start, self._json)
        if self._is_sqlite:
            columns = _without_adapters(columns)
        return self._statement(tuple(columns)), list(zip(*columns.values(), strict=True))


def _columns(
    rows: Sequence[UsageRow], start: Callable[[float], tuple[object, object]], as_json: Callable[[Any], str]
) -> dict[str, Sequence[Any]]:
    """Return the values of rows by column, in the order of the table."""
    fields = dict(zip(UsageRow.__struct_fields__, zip(*map(astuple, rows), strict=True), strict=True))
    times, days = zip(*map(start, fields["started"]), strict=True)
    empty = as_json({})
    convert: Mapping[Kind, Callable[[Sequence[Any]], Sequence[Any]]] = {
        Kind.TIME: lambda _: times,
        Kind.LATER_TIME: lambda values: values if _is_empty(values) else [None if each is None else start(each)[0] for each in values],
        Kind.DAY: lambda _: days,
        Kind.MILLISECONDS: _milliseconds,
        Kind.COST: lambda prices: prices if _is_empty(prices) else [row.cost for row in rows],
        Kind.JSON: lambda values: (
            values if _is_empty(values) else [None if each is None else as_json(each) if each else empty for each in values]
        ),
        Kind.IS_GIVEN: lambda values: [value is not None for value in values],
    }
    return {
        column.name: convert[column.kind](fields[field]) if column.kind in convert else fields[field] for column, field in COLUMNS.items()
    }


def _is_empty(column: Sequence[object]) -> bool:
    return column.count(None) == len(column)


def _milliseconds(column: Sequence[float | None]) -> Sequence[float | None]:
    """Return milliseconds with three digits of seconds. ``round`` takes four times as long."""
    return column if _is_empty(column) else [None if each is None else int(each * 1_000_000 + 0.5) / 1000 for each in column]


def _without_adapters(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Replace None and bool, for which Python's ``sqlite3`` searches an adapter each time. That takes longer than storing the value.

    Empty columns are left out, so that SQLite stores NULL.
    """
    made: dict[str, Sequence[Any]] = {}
    for name, column in columns.items():
        empty = column.count(None) if name in NULLABLE else 0
        if name in _FLAGS:
            made[name] = bytes(column)  # a sequence of integers
        elif not empty:
            made[name] = column
        elif empty < len(column):
            made[name] = [_NULL if value is None else value for value in column]
    return made


def _start_as_datetime(started: float) -> tuple[datetime, date]:
    """Return a time since the epoch, and its day, for PostgreSQL."""
    time = datetime.fromtimestamp(started, UTC)
    return time, time.date()


def start_as_text(started: float) -> tuple[str, str]:
    """Return a time since the epoch, and its day, as SQLAlchemy stores them in SQLite. Many rows have the same second."""
    fraction, second = math.modf(started)
    microsecond = round(fraction * 1_000_000)
    if not 0 <= microsecond < 1_000_000:  # rounded up, or before 1970
        second, microsecond = second + microsecond // 1_000_000, microsecond % 1_000_000
    time, day = _second_as_text(second)
    return time + str(1_000_000 + microsecond)[1:], day  # six digits; a format takes twice as long


@lru_cache(maxsize=64)
def _second_as_text(second: float) -> tuple[str, str]:
    time = datetime.fromtimestamp(second, UTC)
    return f"{time:%Y-%m-%d %H:%M:%S}.", f"{time:%Y-%m-%d}"
