"""The values of a row, as the drivers of both databases need them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import sqlite

from gateway.ledger.insertion import Insertion, start_as_text
from gateway.ledger.row import UsageRow
from gateway.ledger.schema import USAGE, values
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price

_WITHOUT_ADAPTER = {int, float, str}
"""The types of values, not of their subclasses, that Python's ``sqlite3`` passes to SQLite without searching an adapter."""


@pytest.mark.parametrize(
    "each",
    [
        UsageRow("req_1", STARTED, "/v1/chat/completions", "team-a"),
        row(stream=True, price=price(0.5, 2.0), labels={"a": "b"}, metadata={"a": [1, None]}, estimated_by="events", choices=3),
        row(completion=None, chunks=7, first_token=0.1),
    ],
)
def test_sqlite_needs_no_adapter(each: UsageRow) -> None:
    made = Insertion(sqlite.dialect()).parameters(each)
    assert len(made) == len(USAGE.columns) and {*map(type, made)} <= _WITHOUT_ADAPTER


@given(st.floats(-1e9, 1e10) | st.integers(0, 10**10).map(lambda half: half + 0.9999996))
def test_a_time_is_written_for_sqlite_as_sqlalchemy_writes_it(started: float) -> None:
    time, dialect = datetime.fromtimestamp(started, UTC), sqlite.dialect()
    process, process_day = (USAGE.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in ("time", "day"))
    assert process is not None and process_day is not None
    assert start_as_text(started) == (process(time), process_day(time.date()))


@given(st.floats(0, 1e5))
def test_milliseconds_have_three_digits(seconds: float) -> None:
    made = dict(zip(USAGE.columns.keys(), values(row(duration=seconds), "", ""), strict=True))
    assert made["total_ms"] == pytest.approx(round(seconds * 1000, 3), abs=0.001)
    assert made["total_ms"] == round(made["total_ms"], 3)
