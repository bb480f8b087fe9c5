"""The table of the audit log, in SQLite and PostgreSQL: rows are only added, and tampering in the database is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from gateway.access.actor import Actor
from gateway.audit.chain import START, Checkpoint, next_line
from gateway.audit.entry import Entry
from gateway.audit.table import AuditTable
from gateway.audit.verification import verify
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.store import create_database_engine, database_url

KEY = b"k" * 32
WHEN = datetime(2027, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
CHAIN = "a" * 32


def lines(count: int, chain: str = CHAIN) -> list[bytes]:
    made, checkpoint = [], Checkpoint(chain, 0, START)
    for number in range(count):
        line, checkpoint = next_line(
            checkpoint, Entry("key.create", Actor("gateway", "", None), "", f"ключ-{number}\0", None, None), WHEN, KEY
        )
        made.append(line)
    return made


@pytest.fixture
def table(url: str, tmp_path: Path) -> Iterator[AuditTable]:
    with closing(AuditTable(database_url(url, tmp_path))) as made:
        yield made


@pytest.fixture
def engine(url: str, tmp_path: Path) -> Iterator[Engine]:
    made = create_database_engine(database_url(url, tmp_path))
    yield made
    made.dispose()


def test_lines_are_stored_once_as_they_are(table: AuditTable) -> None:
    assert list(table.read()) == []
    made = lines(1200)
    table.write(made[:700])
    table.write(made[500:])
    assert [data for _, data in table.read()] == made
    assert verify(table.read(), [KEY], []).broken is None


def test_a_row_that_is_another_one_is_reported(table: AuditTable) -> None:
    table.write(lines(3))
    checkpoint = Checkpoint(CHAIN, 2, START)
    other, _ = next_line(checkpoint, Entry("x", Actor("gateway", "", None), "", "", None, None), WHEN, KEY)
    with pytest.raises(DatabaseUnavailableError, match="another entry 3"):
        table.write([other])


def test_rows_cannot_be_changed_or_removed(table: AuditTable, engine: Engine) -> None:
    table.write(lines(3))
    for statement in ("UPDATE gateway_audit SET entry = ''", "DELETE FROM gateway_audit WHERE seq = 3"):
        with pytest.raises(SQLAlchemyError, match="append-only"), engine.begin() as connection:
            connection.execute(text(statement))
    assert verify(table.read(), [KEY], []).entries == 3


TAMPERING = {
    "UPDATE gateway_audit SET entry = replace(entry, 'ключ-4', 'ключ-5') WHERE seq = 5": "entry 5: its HMAC is wrong",
    "UPDATE gateway_audit SET entry = 'x' WHERE seq = 5": "entry 5: is not an entry",
    "UPDATE gateway_audit SET time = '2020-01-01 00:00:00.000000' WHERE seq = 5": "entry 5: is not an entry",
    "DELETE FROM gateway_audit WHERE seq = 5": "entry 6: has the number 6, but entry 5 is missing",
    "DELETE FROM gateway_audit WHERE seq > 5": "entry 6: is missing: a checkpoint names entry 10",
    "DELETE FROM gateway_audit": "entry 1: is missing: a checkpoint names entry 10",
    "UPDATE gateway_audit SET seq = CASE seq WHEN 5 THEN -6 WHEN 6 THEN -5 ELSE seq END": "is not an entry",
    f"INSERT INTO gateway_audit SELECT chain, 11, time, entry FROM gateway_audit WHERE chain = '{CHAIN}' AND seq = 5": "is not an entry",
}


@pytest.mark.parametrize("statement", TAMPERING)
def test_tampering_of_an_owner_of_the_database_is_found(
    table: AuditTable, engine: Engine, without_triggers: Callable[[], None], statement: str
) -> None:
    made = lines(10)
    table.write(made)
    checkpoint = Checkpoint(CHAIN, 10, made[-1][-66:-2].decode())
    assert verify(table.read(), [KEY], [checkpoint]).broken is None
    without_triggers()
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert TAMPERING[statement] in str(verify(table.read(), [KEY], [checkpoint]).broken)


@pytest.fixture
def without_triggers(engine: Engine) -> Callable[[], None]:
    """Return what an attacker does first who owns the tables."""
    statements = {
        "sqlite": ["DROP TRIGGER gateway_audit_no_update", "DROP TRIGGER gateway_audit_no_delete"],
        "postgresql": ["DROP TRIGGER gateway_audit_append_only ON gateway_audit"],
    }

    def drop() -> None:
        with engine.begin() as connection:
            for statement in statements[engine.dialect.name]:
                connection.exec_driver_sql(statement)

    return drop
