"""The database that the ledger is kept in: SQLite or PostgreSQL.

The rules: a row is known by its request's id, and a second one with the same id changes nothing; whatever goes wrong is either the
database's state, and then the same rows will be good later, or one row's own fault, which must not keep the others
waiting. Every call may take as long as the database does: they belong on a thread.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.util import CommandError
from sqlalchemy import Connection, Date, Dialect, Engine, create_engine, delete, event, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError, StatementError

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.row import UsageRow
from gateway.ledger.schema import USAGE, values

_MIGRATIONS = Path(__file__).parent / "migrations"
# One gateway at a time, until the transaction ends; the number is any that is only ours.
_ALONE = {"postgresql": "SELECT pg_advisory_xact_lock(1986817133)", "sqlite": "BEGIN IMMEDIATE"}
_CONNECT: dict[str, dict[str, int | str]] = {
    # A server that is gone without a word is noticed within half a minute (libpq's connection parameters).
    "postgresql": {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        "client_encoding": "utf8",  # where the database has none (SQL_ASCII), psycopg gives bytes for text
    },
    "sqlite": {"timeout": 10},
}
_BY_PLACE: dict[str, Literal["format", "qmark"]] = {"postgresql": "format", "sqlite": "qmark"}
_BATCH, _PRUNED = 2000, 500  # rows of a transaction
_STATE = (SQLAlchemyError, CommandError, OSError)  # alembic's is for a table that is of a later version
_log = logging.getLogger("vllm_gateway.ledger")


def database_url(url: str, folder: Path) -> URL:
    """The URL with its driver. The file of SQLite is relative to ``folder``, the one of the configuration."""
    made = make_url(url)
    if made.get_backend_name() == "sqlite":
        return made.set(database=str(folder / (made.database or "")))
    return made.set(drivername="postgresql+psycopg")


def create_database_engine(url: URL) -> Engine:
    """A way to the database; nothing is opened yet."""
    backend = url.get_backend_name()
    given = {name: value for name, value in _CONNECT[backend].items() if name not in url.query}
    made = create_engine(
        url, connect_args=given, pool_pre_ping=backend == "postgresql", paramstyle=_BY_PLACE[backend], json_serializer=_as_json
    )
    if backend == "sqlite":
        event.listen(made, "connect", _prepare_sqlite)
    return made


def _as_json(value: object) -> str:
    """Mostly labels, of which most rows have none."""
    return "{}" if value == {} else json.dumps(value)


class _Insertion:
    """The statement as the driver takes it, and what SQLAlchemy would do to the values; prepared once, since it costs as much for
    each row as SQLite does (docs/performance.md)."""

    def __init__(self, dialect: Dialect) -> None:
        insert = sqlite.insert if dialect.name == "sqlite" else postgresql.insert
        self.statement = str(insert(USAGE).on_conflict_do_nothing().compile(dialect=dialect))
        self._processors: list[tuple[int, Callable[[Any], Any]]] = []
        for place, column in enumerate(USAGE.columns):
            processor = column.type.dialect_impl(dialect).bind_processor(dialect)
            if processor is not None:  # a day is that of many rows
                self._processors.append((place, lru_cache(maxsize=8)(processor) if isinstance(column.type, Date) else processor))

    def parameters(self, row: UsageRow) -> tuple[Any, ...]:
        """A row's values. Raises ValueError where one cannot be brought into the database's form."""
        made = values(row)
        for place, processor in self._processors:
            made[place] = processor(made[place])
        return tuple(made)


def _prepare_sqlite(connection: Any, _: object) -> None:
    """Readers and the writer do not wait for each other, and what is committed is on disk (sqlite.org/wal.html)."""
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}").close()


class UsageStore:
    """The writing side."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self.engine = create_database_engine(url)
        self._insertion = _Insertion(self.engine.dialect)
        self._ready = False
        self._preparing = threading.Lock()

    def close(self) -> None:
        self.engine.dispose()

    def write(self, rows: Sequence[UsageRow]) -> int:
        """Have these rows in the database; returns how many it cannot hold.

        Raises DatabaseUnavailableError; nothing was written then, and the rows must be written again.
        """
        try:
            self._prepare()
            return sum(self._write(rows[start : start + _BATCH]) for start in range(0, len(rows), _BATCH))
        except _STATE as error:
            raise DatabaseUnavailableError(reason(error)) from error

    def prune(self, before: datetime) -> bool:
        """Delete some of the rows that are older; True when there may be more. Raises DatabaseUnavailableError."""
        old = select(USAGE.c.request_id).where(USAGE.c.time < before).order_by(USAGE.c.time).limit(_PRUNED)
        try:
            self._prepare()
            with self.engine.begin() as connection:
                return connection.execute(delete(USAGE).where(USAGE.c.request_id.in_(old))).rowcount == _PRUNED
        except _STATE as error:
            raise DatabaseUnavailableError(reason(error)) from error

    def _write(self, rows: Sequence[UsageRow]) -> int:
        try:
            self._commit(rows)
        except (SQLAlchemyError, OverflowError, ValueError) as error:
            if not _is_of_a_row(error):
                raise
            if len(rows) > 1:
                half = len(rows) // 2
                return self._write(rows[:half]) + self._write(rows[half:])
            _log.error("the ledger cannot hold the row of request %s: %s", rows[0].id, reason(error))
            return 1
        return 0

    def _commit(self, rows: Sequence[UsageRow]) -> None:
        with self.engine.begin() as connection:
            connection.exec_driver_sql(self._insertion.statement, [self._insertion.parameters(row) for row in rows])

    def _prepare(self) -> None:
        """Bring the table to this version's shape, once."""
        with self._preparing:
            if self._ready:
                return
            if self.engine.dialect.name == "sqlite" and self._url.database:
                Path(self._url.database).touch(mode=0o600)  # who used what is not for everybody's eyes
            with self.engine.begin() as connection:
                migrate(connection)
            self._ready = True


def migrate(connection: Connection) -> None:
    """Take the steps that are missing, inside the connection's transaction. Of several gateways that start at once, one takes them."""
    connection.exec_driver_sql(_ALONE[connection.dialect.name])
    config = AlembicConfig()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _is_of_a_row(error: Exception) -> bool:
    """Whether the error is about what was to be written, and would come again."""
    before_it_was_sent = isinstance(error, StatementError) and not isinstance(error, DBAPIError)
    return before_it_was_sent or isinstance(error, DataError | IntegrityError | OverflowError | ValueError)


def reason(error: Exception) -> str:
    """One line, without the statement and its values."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__
