"""The ledger's table, in both databases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, select, text

from gateway.audit.table import AUDIT
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.row import LOST
from gateway.ledger.schema import METADATA, USAGE
from gateway.ledger.store import UsageStore, create_database_engine, database_url
from gateway.notices.table import NOTICES
from gateway.sign_in.tables import PEOPLE
from gateway.store import schema as store_schema
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price
from tests.support.ports import refusing
from tests.support.postgres import Postgres


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        yield made


def stored(engine: Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(each) for each in connection.execute(select(USAGE).order_by(USAGE.c.request_id)).mappings()]


def test_a_row_is_stored_unchanged(store: UsageStore) -> None:
    full = row(
        team="t", stream=True, code="upstream_disconnected", incomplete="upstream", first_token=0.1, queued=0.05, price=price(0.5, 2.0),
        labels={"cost_center": "17"}, user="ünï", metadata={"a": [1, None]}, choices=3,
    )  # fmt: skip
    assert store.write([full]) == 0
    (found,) = stored(store.engine)
    time = found.pop("time")
    assert time.replace(tzinfo=UTC) == datetime.fromtimestamp(STARTED, UTC)
    assert found == {
        "request_id": "req_1", "day": date(2027, 1, 15), "key": "team-a", "team": "t", "model": "tiny", "server": "tiny#0",
        "endpoint": "/v1/chat/completions", "stream": True, "status": 200, "code": "upstream_disconnected", "incomplete": "upstream",
        "prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 2, "reasoning_tokens": 1, "estimated": False,
        "total_ms": 250.0, "first_token_ms": 100.0, "queued_ms": 50.0, "cost_nano": 15_000, "labels": {"cost_center": "17"},
        "end_user": "ünï", "metadata": {"a": [1, None]}, "estimated_by": None, "choices": 3, "param": None, "requested_model": None,
        "reason": None, "limit_holder": None, "detail": None, "retries": None, "failures": None, "late": None,
        "nearest_limit": None, "trace_id": None, "continuations": None,
    }  # fmt: skip


def test_a_database_without_an_encoding_stores_the_text(server: Postgres, tmp_path: Path) -> None:
    with closing(UsageStore(database_url(server.database("SQL_ASCII"), tmp_path))) as store:
        assert store.write([row(user="ünï")]) == 0
        assert [each["end_user"] for each in stored(store.engine)] == ["ünï"]


def test_a_repeated_row_is_stored_once_as_it_came_first(store: UsageStore) -> None:
    first, lost = row(1), row(1, incomplete=LOST, status=None)
    assert store.write([first, lost]) == store.write([row(2), first, row(3)]) == store.write([lost]) == 0
    assert [(each["request_id"], each["incomplete"]) for each in stored(store.engine)] == [
        ("req_1", None),
        ("req_2", None),
        ("req_3", None),
    ]


def test_a_row_that_the_database_cannot_store_delays_no_other(store: UsageStore) -> None:
    """PostgreSQL's texts hold no NUL; SQLite takes everything that a row can say."""
    unfit = store.write([row(1), row(2, code="a\0b"), row(3)])
    held = [each["request_id"] for each in stored(store.engine)]
    assert (unfit, held) in ((1, ["req_1", "req_3"]), (0, ["req_1", "req_2", "req_3"]))
    assert unfit == (store.engine.dialect.name == "postgresql")


def test_many_rows_are_written(store: UsageStore) -> None:
    assert store.write([row(number) for number in range(4001)]) == 0
    assert len(stored(store.engine)) == 4001


def test_old_rows_are_deleted_and_no_others(store: UsageStore) -> None:
    store.write([row(number, started=STARTED - 86400 * (number % 2)) for number in range(1300)])
    before = datetime.fromtimestamp(STARTED, UTC) - timedelta(hours=1)
    assert [store.prune(before), store.prune(before)] == [True, False]
    assert [each["day"] for each in stored(store.engine)] == [date(2027, 1, 15)] * 650


def test_the_steps_lead_to_the_table_as_it_is_declared(store: UsageStore) -> None:
    store.write([])
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": "gateway_usage_schema"})
        assert {AUDIT, NOTICES, PEOPLE, store_schema.KEYS, store_schema.TEAMS} <= {*METADATA.tables.values()}
        assert compare_metadata(context, METADATA) == []


def test_several_gateways_may_start_at_once(url: str, tmp_path: Path) -> None:
    outcomes: list[int] = []

    def start(number: int) -> None:
        with closing(UsageStore(database_url(url, tmp_path))) as own:
            outcomes.append(own.write([row(number)]))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert outcomes == [0] * 4
    with closing(UsageStore(database_url(url, tmp_path))) as last:
        assert len(stored(last.engine)) == 4


def test_a_table_of_a_later_version_is_left_alone(store: UsageStore) -> None:
    store.write([row(1)])
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE gateway_usage_schema SET version_num = '9999'"))
    with closing(UsageStore(store.engine.url)) as older, pytest.raises(DatabaseUnavailableError, match="9999"):
        older.write([row(2)])
    assert len(stored(store.engine)) == 1


def test_an_unavailable_database_gives_its_reason(tmp_path: Path) -> None:
    with refusing() as port:
        for url in (f"postgresql://u@127.0.0.1:{port}/x", "sqlite:///no/such/folder/usage.db"):
            with closing(UsageStore(database_url(url, tmp_path))) as gone, pytest.raises(DatabaseUnavailableError):
                gone.write([row()])


def test_the_cache_of_a_connection_is_that_of_its_engine(tmp_path: Path) -> None:
    sizes = []
    for cache in (None, 4096):
        engine = create_database_engine(database_url("sqlite:///usage.db", tmp_path), cache)
        with engine.connect() as connection:
            sizes.append(connection.execute(text("PRAGMA cache_size")).scalar())
        engine.dispose()
    assert sizes[0] != sizes[1] == -4096


def test_a_file_is_beside_the_configuration_and_for_its_owner_alone(tmp_path: Path) -> None:
    url = database_url("sqlite:///usage.db", tmp_path)
    assert url.database == str(tmp_path / "usage.db") and database_url("sqlite:////var/usage.db", tmp_path).database == "/var/usage.db"
    with closing(UsageStore(url)) as made:
        made.write([row()])
    assert (tmp_path / "usage.db").stat().st_mode & 0o777 == 0o600
