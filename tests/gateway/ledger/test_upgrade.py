"""Tables and waiting rows of commit 3c1fad8 are upgraded at the first start. That commit wrote the files in ``commit_3c1fad8``."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, select

from gateway.audit.table import AUDIT
from gateway.ledger.row import UsageRow, decode, encode, frames
from gateway.ledger.schema import METADATA, USAGE
from gateway.ledger.spool import waiting_files
from gateway.ledger.spool_folders import owner_of, spool_of
from gateway.ledger.store import UsageStore, create_database_engine, database_url
from gateway.ledger.upgrade import folder_name, upgrade_files, upgraded
from gateway.notices.table import NOTICES
from gateway.sign_in.tables import PEOPLE
from tests.gateway.ledger.rows import row
from tests.support.money import price

FILES = Path(__file__).parent / "commit_3c1fad8"


def given(url: str, folder: Path) -> None:
    """Fill an empty database with the tables and rows of the commit."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(folder / "usage.db")) as connection:
            connection.executescript((FILES / "sqlite.sql").read_text())
        return
    engine = create_database_engine(database_url(url, folder))
    with closing(engine.raw_connection()) as connection:
        connection.cursor().execute((FILES / "postgresql.sql").read_text().encode())
        connection.commit()
    engine.dispose()


def stored(engine: Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        return [dict(each) for each in connection.execute(select(USAGE).order_by(USAGE.c.request_id)).mappings()]


def test_a_table_keeps_its_rows_and_gets_what_it_lacks(url: str, tmp_path: Path) -> None:
    given(url, tmp_path)
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        assert store.write([row(9)]) == 0
        assert [each["request_id"] for each in stored(store.engine)] == ["req_1", "req_2", "req_3", "req_9"]
        with store.engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": "gateway_usage_schema"})
            assert {AUDIT, NOTICES, PEOPLE} <= {*METADATA.tables.values()}
            assert compare_metadata(context, METADATA) == []


def test_waiting_rows_become_the_rows_that_the_commit_stored(tmp_path: Path) -> None:
    """The same rows were given to both. Only the method of an estimate is new."""
    config = tmp_path / "gateway.yaml"
    shutil.copytree(FILES, old := tmp_path / "spools" / folder_name(str(config)))
    with spool_of(owner_of("sqlite:///fresh.db", config), tmp_path / "spools") as spooled:
        assert (spooled.rows, waiting_files(old)) == (3, [])
        rows = [decode(payload) for path in waiting_files(spooled.folder) for payload in frames(path.read_bytes())]
    given("sqlite:///usage.db", tmp_path)
    with (
        closing(UsageStore(database_url("sqlite:///fresh.db", tmp_path))) as fresh,
        closing(UsageStore(database_url("sqlite:///usage.db", tmp_path))) as other,
    ):
        assert fresh.write(rows) == other.write([]) == 0
        found = stored(fresh.engine)
        assert [each["estimated_by"] for each in found] == [None, "events", None]
        assert [each | {"estimated_by": None} for each in found] == stored(other.engine)


def test_an_upgrade_may_be_repeated(tmp_path: Path) -> None:
    shutil.copytree(FILES, tmp_path / "old")
    paths = waiting_files(tmp_path / "old")
    contents = []
    for _ in range(2):
        upgrade_files(paths)
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1] != [path.read_bytes() for path in waiting_files(FILES)]


def test_other_bytes_stay_as_they_are() -> None:
    current = encode(row(price=price(0.2, 0.8)))
    assert len(UsageRow.__struct_fields__) > 23
    for payload in (current, b"\xc1", b"\x93\x01\x02\x03"):
        assert upgraded(payload) == payload
