"""Prepare the insertion of rows: one statement, and a row's values as the database's driver needs them.

The rule: nothing is converted per row that can be converted once. The statement is compiled once, and the values are passed directly to the
driver, because SQLAlchemy's handling of parameters costs as much as SQLite does. Every value has a type that the driver knows.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.dialects import postgresql, sqlite

from gateway.ledger.row import UsageRow
from gateway.ledger.schema import USAGE, values

_NAMES = tuple(USAGE.columns.keys())
_STREAM, _ESTIMATED, _LABELS, _METADATA = map(_NAMES.index, ("stream", "estimated", "labels", "metadata"))
_NULL = math.nan
"""SQLite stores NaN as NULL (sqlite.org/floatingpoint.html)."""


class Insertion:
    """The insert statement of a database, and the conversion of the values."""

    def __init__(self, dialect: Dialect) -> None:
        self._is_sqlite = dialect.name == "sqlite"
        insert = sqlite.insert if self._is_sqlite else postgresql.insert
        self.statement = str(insert(USAGE).on_conflict_do_nothing().compile(dialect=dialect))
        self._start = start_as_text if self._is_sqlite else _start_as_datetime
        self._json = USAGE.c.labels.type.dialect_impl(dialect).bind_processor(dialect) or json.dumps
        self._no_labels = self._json({})

    def parameters(self, row: UsageRow) -> tuple[Any, ...]:
        """Return a row's values. Raises ValueError and OverflowError for a value that the database cannot store."""
        made = values(row, *self._start(row.started))
        made[_LABELS] = self._json(row.labels) if row.labels else self._no_labels
        if row.metadata is not None:
            made[_METADATA] = self._json(row.metadata)
        return _without_adapters(made) if self._is_sqlite else tuple(made)


def _without_adapters(made: list[Any]) -> tuple[Any, ...]:
    """Replace None and bool, for which Python's ``sqlite3`` searches an adapter each time. That takes longer than storing the value."""
    made[_STREAM], made[_ESTIMATED] = int(made[_STREAM]), int(made[_ESTIMATED])
    return tuple([_NULL if value is None else value for value in made])


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
    return f"{time}.{microsecond:06}", day


@lru_cache(maxsize=64)
def _second_as_text(second: float) -> tuple[str, str]:
    time = datetime.fromtimestamp(second, UTC)
    return f"{time:%Y-%m-%d %H:%M:%S}", f"{time:%Y-%m-%d}"
