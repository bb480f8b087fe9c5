"""The values of a row, as the drivers of both databases need them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Dialect, make_url

from gateway.ledger.insertion import Insertion, start_as_text
from gateway.ledger.row import UsageRow
from gateway.ledger.schema import USAGE
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price

_WITHOUT_ADAPTER = {int, float, str}
"""The types of values, not of their subclasses, that Python's ``sqlite3`` passes to SQLite without searching an adapter."""


SQLITE, POSTGRESQL = (make_url(f"{driver}://").get_dialect()() for driver in ("sqlite", "postgresql+psycopg"))
PLAIN = UsageRow("req_1", STARTED, "/v1/chat/completions", "team-a")
FULL = row(
    2, team="t", stream=True, code="c", incomplete="upstream", first_token=0.1, queued=0.05, price=price(0.5, 2.0), labels={"a": "b"},
    user="u", metadata={"a": [1, None]}, estimated_by="bytes", choices=3, param="model", requested_model="r",
    reason="tokens_per_day", limit_holder="key a", detail="d", retries=2, failures="a#0 connect", late=STARTED + 1.5,
    nearest_limit="93% of tokens_per_day of key a", trace_id="0af7651916cd43dd8448eb211c80319c",
    continuations="a#0 disconnected token_ids continued",
)  # fmt: skip


def inserted(dialect: Dialect, rows: Sequence[UsageRow]) -> list[dict[str, object]]:
    """Return the values of rows by the columns that the statement names. psycopg has JSON in an object."""
    statement, values = Insertion(dialect).prepare(rows)
    names = statement[statement.index("(") + 1 : statement.index(")")].replace('"', "").split(", ")
    return [{name: getattr(value, "obj", value) for name, value in zip(names, each, strict=True)} for each in values]


@pytest.mark.parametrize("rows", [[PLAIN], [FULL], [PLAIN, FULL]])
def test_sqlite_needs_no_adapter(rows: Sequence[UsageRow]) -> None:
    for each in inserted(SQLITE, rows):
        assert {*map(type, each.values())} <= _WITHOUT_ADAPTER


def test_columns_without_values_are_left_out_for_sqlite() -> None:
    (alone,) = inserted(SQLITE, [PLAIN])
    assert {*alone} == {"request_id", "time", "day", "key", "endpoint", "stream", "estimated", "labels"}
    beside, full = inserted(SQLITE, [PLAIN, FULL])
    assert {*beside} == {*full} == {*USAGE.columns.keys()}
    empty = {name for name, value in beside.items() if isinstance(value, float) and math.isnan(value)}
    assert empty == {*beside} - {*alone} and {name: beside[name] for name in alone} == alone


def test_postgresql_gets_all_columns_with_their_types() -> None:
    (alone,) = inserted(POSTGRESQL, [PLAIN])
    assert [*alone] == [*USAGE.columns.keys()]
    assert (alone["team"], alone["stream"], alone["estimated"]) == (None, False, False)


@pytest.mark.parametrize("dialect", [SQLITE, POSTGRESQL], ids=lambda dialect: dialect.name)
def test_the_values_of_a_row_do_not_depend_on_the_rows_beside_it(dialect: Dialect) -> None:
    rows = [PLAIN, FULL]
    for alone, beside in zip(rows, inserted(dialect, rows), strict=True):
        (expected,) = inserted(dialect, [alone])
        assert {name: beside[name] for name in expected} == expected


@given(st.floats(-1e9, 1e10) | st.integers(0, 10**10).map(lambda half: half + 0.9999996))
def test_a_time_is_written_for_sqlite_as_sqlalchemy_writes_it(started: float) -> None:
    time, dialect = datetime.fromtimestamp(started, UTC), SQLITE
    process, process_day = (USAGE.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in ("time", "day"))
    assert process is not None and process_day is not None
    assert start_as_text(started) == (process(time), process_day(time.date()))


@given(st.floats(0, 1e5))
def test_milliseconds_have_three_digits(seconds: float) -> None:
    (made,) = inserted(POSTGRESQL, [row(duration=seconds)])
    total = made["total_ms"]
    assert isinstance(total, float) and total == round(total, 3) == pytest.approx(round(seconds * 1000, 3), abs=0.001)
