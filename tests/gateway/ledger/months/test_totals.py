"""Rows and their totals: whichever rows were replaced, each report is the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.ledger.months.tables import GROUPS
from gateway.ledger.row import COLUMNS
from gateway.ledger.store import UsageStore, database_url
from gateway.snapshot.money import MAX_COST, MAX_PRICE
from gateway.usage.dimensions import DIMENSIONS
from gateway.usage.queries import UsageReport, parse_query, run_query
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price

NOW = datetime.fromtimestamp(STARTED, UTC) + timedelta(seconds=10)
HOUR = 3600.0
BY = "day,key,team,model,server,endpoint,code,label:a"


def report(store: UsageStore, by: str = BY, **more: str) -> UsageReport:
    return run_query(store.engine, parse_query({"by": by, "since": "2026-11", **more}, NOW))


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        yield made


def test_totals_have_the_dimensions_of_reports_but_the_end_user() -> None:
    assert {*DIMENSIONS.values()} - {*GROUPS} == {"end_user"}
    assert {*GROUPS} <= {column.name for column in COLUMNS}


ROWS = st.lists(
    st.builds(
        lambda age, fields: (age, fields),
        st.floats(0, 30 * 24),
        st.fixed_dictionaries(
            {
                "key": st.sampled_from(["a", "b/c"]),
                "team": st.sampled_from([None, "t"]),
                "model": st.sampled_from([None, "m"]),
                "code": st.sampled_from([None, "overloaded"]),
                "labels": st.sampled_from([{}, {"a": "1"}, {"a": "1", "b": "2"}, {"a": ""}]),
                "estimated_by": st.sampled_from([None, "bytes"]),
                "incomplete": st.sampled_from([None, "client"]),
                "prompt": st.none() | st.integers(0, 2**40),
                "price": st.sampled_from([None, price(0.1, 0.2)]),
            }
        ),
    ),
    max_size=30,
)


@given(rows=ROWS, retention=st.floats(0, 30 * 24))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_report_changes_when_rows_are_replaced(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], retention: float) -> None:
    folder = tmp_path_factory.mktemp("usage")
    with closing(UsageStore(database_url(f"sqlite:///{folder}/usage.db", folder))) as store:
        store.write([row(number, started=STARTED - age * HOUR, **fields) for number, (age, fields) in enumerate(rows)])
        queries: tuple[dict[str, str], ...] = (
            {},
            {"key": "b"},
            {"team": "t"},
            {"model": "m"},
            {"until": "2027-01-10"},
            {"since": "2027-01-05"},
        )
        before = [report(store, **query) for query in queries]
        store.prune(NOW - timedelta(hours=retention))
        for query, expected in zip(queries, before, strict=True):
            found = report(store, **query)
            assert (found.sums, found.requests, found.estimated_by) == (expected.sums, expected.requests, expected.estimated_by), query


def test_costs_beyond_64_bits_stay_exact(store: UsageStore) -> None:
    store.write([row(number, price=price(MAX_PRICE, 0.0), prompt=2**40) for number in range(4)])
    before = report(store)
    assert before.sums[0].cost == 4 * MAX_COST
    store.prune(NOW + timedelta(days=1))
    assert report(store).sums == before.sums


def test_rows_are_replaced_once_by_several_gateways_at_the_same_time(store: UsageStore) -> None:
    store.write([row(number, team=f"t{number % 7}") for number in range(3000)])
    before = report(store)

    def prune() -> None:
        while store.prune(NOW + timedelta(days=1)):
            pass

    threads = [threading.Thread(target=prune) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert report(store).sums == before.sums


def test_a_day_of_totals_counts_only_as_a_whole(store: UsageStore) -> None:
    store.write([row(1), row(2, started=STARTED - 24 * HOUR)])
    store.prune(NOW + timedelta(hours=1))
    assert [report(store, since=since).requests for since in ("2027-01-14", "2027-01-14T12:00", "2027-01-15T00:00:01")] == [2, 1, 0]
    assert [report(store, until=until).requests for until in ("2027-01-16", "2027-01-15T12:00", "2027-01-15")] == [2, 1, 1]


def test_totals_have_no_end_users(store: UsageStore) -> None:
    store.write([row(1, user="ada"), row(2, user="eve")])
    assert {each.group for each in report(store, by="user").sums} == {("ada",), ("eve",)}
    store.prune(NOW + timedelta(hours=1))
    assert [(each.group, each.requests) for each in report(store, by="user").sums] == [((None,), 2)]
