"""A closed month: its report never changes, later rows are corrections, and no row is in both or in neither."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from gateway.ledger.errors import MonthError
from gateway.ledger.months.closing import close_month, closed_months, hash_of, month_of, read_month
from gateway.ledger.months.tables import CLOSED
from gateway.ledger.row import MIRRORED
from gateway.ledger.store import UsageStore, database_url
from gateway.usage.queries import parse_query, run_query
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price
from tests.support.rows import each_row

DAY = 86400.0
MONTH = "2027-01"
LATER = datetime(2027, 2, 3, tzinfo=UTC)
PRICE = price(1.0, 2.0)


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        yield made


def counted(lines: Any, name: str = "requests") -> int:
    return sum(json.loads(line)[name] for line in lines)


def requests(store: UsageStore) -> int:
    return run_query(store.engine, parse_query({"by": "team", "since": "2026-12"}, LATER)).requests


def test_a_report_has_a_line_for_each_key_team_model_and_labels(store: UsageStore) -> None:
    store.write([row(1, price=PRICE), row(2, price=PRICE, team="t"), row(3, team="t", labels={"cost_center": "17"}), row(4, model=None)])
    store.write([row(5, started=STARTED - 10 * DAY), row(6, key=MIRRORED), row(7, price=PRICE, estimated_by="bytes", incomplete="client")])
    store.write([row(8, started=STARTED - 20 * DAY)])  # of another month
    found = close_month(store.engine, MONTH, LATER)
    lines = [json.loads(line) for line in found.lines]
    assert [(each["team"], each["model"], each["labels"], each["requests"], each["cost"]) for each in lines] == [
        ("t", "tiny", {"cost_center": "17"}, 1, None),
        ("t", "tiny", {}, 1, "0.00002"),
        (None, "tiny", {}, 3, "0.00004"),
        (None, None, {}, 1, None),
    ]
    assert (lines[2]["prompt_tokens"], lines[2]["estimated"], lines[2]["incomplete"]) == (30, 1, 1)
    assert found.is_intact and found.hash == hash_of(found.lines) and not found.corrections
    assert closed_months(store.engine) == [(MONTH, LATER, found.hash)]


def test_closing_again_changes_nothing_and_later_rows_are_corrections(store: UsageStore) -> None:
    store.write([row(1), row(2, started=STARTED + DAY)])
    first = close_month(store.engine, MONTH, LATER)
    assert close_month(store.engine, MONTH, LATER + timedelta(days=9)) == first
    store.write([row(3), row(1), row(4, started=LATER.timestamp() - 60)])
    again = close_month(store.engine, MONTH, LATER + timedelta(days=9))
    assert (again.lines, again.hash, again.closed) == (first.lines, first.hash, first.closed)
    (correction,) = map(json.loads, again.corrections)
    assert (correction["requests"], datetime.fromisoformat(correction["late"]).tzinfo) == (1, UTC), "the repeated row is none"
    assert requests(store) == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_retention_changes_no_report(store: UsageStore, when: str) -> None:
    store.write([row(number, started=STARTED - number * 3600, team=f"t{number % 3}", price=PRICE) for number in range(700)])
    usage = run_query(store.engine, parse_query({"by": "team,day,code", "since": "2026-12"}, LATER))
    if when == "before":
        assert store.prune(LATER)
    closed = close_month(store.engine, MONTH, LATER)
    while store.prune(LATER):
        pass
    store.write([row(1000)])
    store.prune(LATER)
    found = read_month(store.engine, MONTH)
    assert found is not None and found.lines == closed.lines and counted(found.corrections) == 1
    left = run_query(store.engine, parse_query({"by": "team,day,code", "since": "2026-12"}, LATER))
    assert left.requests == usage.requests + 1
    assert [each for each in left.sums if each.group[0] is not None] == list(usage.sums), "day by day, exactly"


def test_rows_that_arrive_meanwhile_are_in_the_report_or_are_corrections(store: UsageStore) -> None:
    """Writers and two gateways that close the month at once: each row is counted once."""
    store.write([row(0)])
    found: list[Any] = []

    def write(first: int) -> None:
        for number in range(first, first + 40):
            store.write([row(number)])

    writers = [threading.Thread(target=write, args=(first,)) for first in (100, 200)]
    closers = [threading.Thread(target=lambda: found.append(close_month(store.engine, MONTH, LATER))) for _ in range(2)]
    for thread in (*writers, *closers):
        thread.start()
    for thread in (*writers, *closers):
        thread.join()
    closed = read_month(store.engine, MONTH)
    assert closed is not None and {each.hash for each in found} == {closed.hash}
    assert counted(closed.lines) + counted(closed.corrections) == requests(store) == 81


def test_a_closing_that_was_interrupted_is_completed(store: UsageStore) -> None:
    """The month is marked, and the process dies before it stores the report: later rows are corrections already."""
    store.write([row(1)])
    with store.engine.begin() as connection:
        connection.execute(
            text("INSERT INTO gateway_usage_months (month, closed) VALUES (:month, :closed)"), {"month": MONTH, "closed": LATER}
        )
    assert read_month(store.engine, MONTH) is None
    store.write([row(2)])
    found = close_month(store.engine, MONTH, LATER)
    assert (counted(found.lines), counted(found.corrections)) == (1, 1)


def test_a_changed_report_is_noticed(store: UsageStore) -> None:
    store.write([row(1)])
    close_month(store.engine, MONTH, LATER)
    with store.engine.begin() as connection:
        connection.execute(update(CLOSED).values(line=CLOSED.c.line + " "))
    found = read_month(store.engine, MONTH)
    assert found is not None and not found.is_intact


def test_a_month_that_has_not_ended_cannot_be_closed(store: UsageStore) -> None:
    store.write([row(1)])
    with pytest.raises(MonthError, match="has not ended: a month can be closed from 2027-02-01 on, UTC"):
        close_month(store.engine, MONTH, datetime(2027, 1, 31, 23, 59, tzinfo=UTC))
    assert close_month(store.engine, MONTH, datetime(2027, 2, 1, tzinfo=UTC)).month == MONTH


@each_row("month", ["2027", "2027-13", "2027-1", "2027-01-01", "0000-01", "9999-12", "'; --", ""])
def test_other_texts_are_no_month(month: str) -> None:
    with pytest.raises(MonthError, match="not a month"):
        month_of(month)
