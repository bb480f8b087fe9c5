"""Write rows to the ledger's database: SQLite or PostgreSQL.

The rules: a row is identified by its request's id; a second row with the same id changes nothing. An error is either a state of the
database, so the same rows can be written later, or the fault of one row, which must not block the others. Every call may take as
long as the database does, so calls belong on a thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, Executable, create_engine, delete, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError, StatementError

from gateway.config.database_url import database_url as parsed_url
from gateway.ledger.engine_samples import write_samples
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.insertion import Insertion
from gateway.ledger.months.closing import mark_late
from gateway.ledger.months.totals import replace_by_totals
from gateway.ledger.row import UsageRow
from gateway.ledger.schema import ENGINE_SAMPLES
from gateway.ledger.statements import batches
from gateway.ledger.upgrade import upgrade_table

_MIGRATIONS = Path(__file__).parent / "migrations"
# One gateway at a time, until the transaction ends. The number is arbitrary but unique to this project.
_LOCKS = {"postgresql": "SELECT pg_advisory_xact_lock(1986817133)", "sqlite": "BEGIN IMMEDIATE"}
_CONNECT: dict[str, dict[str, int | str]] = {
    # A server that vanished is noticed within half a minute (connection parameters of libpq).
    "postgresql": {
        "connect_timeout": 5,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        "client_encoding": "utf8",  # without an encoding (SQL_ASCII), psycopg returns bytes for text
    },
    "sqlite": {"timeout": 10},
}
_PRUNED = 500  # rows of a transaction
_BATCH = {"postgresql": 8000, "sqlite": 50_000}  # rows of a transaction
_GATHER = {"postgresql": 0.75, "sqlite": 4.0}  # seconds
_WRITER_CACHE = 16 * 1024  # KiB of pages, with the ends of the index of keys for some thousand keys; SQLite's default is 2,000
_UNAVAILABLE = (SQLAlchemyError, CommandError, OSError)  # CommandError: the table is of a later version
_MIGRATING = threading.Lock()
"""One migration at a time in this process, because alembic has one context for all threads."""
_log = logging.getLogger("vllm_gateway.ledger")


def database_url(url: str, folder: Path) -> URL:
    """Return the URL with its driver. SQLite's file is relative to ``folder``, the configuration's."""
    made = parsed_url(url)
    if made.get_backend_name() == "sqlite":
        return made.set(database=str(folder / (made.database or "")))
    return made.set(drivername="postgresql+psycopg")


def create_database_engine(url: URL, cache: int | None = None) -> Engine:
    """Create the engine; no connection is opened yet. ``cache``: KiB of pages that each connection to SQLite caches."""
    backend = url.get_backend_name()
    given = {name: value for name, value in _CONNECT[backend].items() if name not in url.query}
    is_sqlite = backend == "sqlite"
    style: Literal["format", "qmark"] = "qmark" if is_sqlite else "format"
    made = create_engine(url, connect_args=given, pool_pre_ping=not is_sqlite, paramstyle=style, json_serializer=json.dumps)
    if is_sqlite:
        event.listen(made, "connect", partial(_prepare_sqlite, cache))
    return made


def _prepare_sqlite(cache: int | None, connection: Any, _: object) -> None:
    """Let readers and the writer work at the same time, and sync each commit (sqlite.org/wal.html)."""
    for pragma in ("journal_mode=WAL", "synchronous=FULL", *(() if cache is None else (f"cache_size=-{cache}",))):
        connection.execute(f"PRAGMA {pragma}").close()


@contextmanager
def available() -> Iterator[None]:
    """Raise DatabaseUnavailableError for an error of the database in the block."""
    try:
        yield
    except _UNAVAILABLE as error:
        raise DatabaseUnavailableError(reason(error)) from error


class Database:
    """The transactions of a database whose tables are those of this version. Stores of entries and rows derive from it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_ready = False

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction. It is committed at the end of the block. Raises DatabaseUnavailableError."""
        with self.prepared(), self.engine.begin() as connection:
            yield connection

    def rows(self, query: Executable) -> Sequence[Any]:
        """Return the rows of a query, in a separate transaction. Raises DatabaseUnavailableError."""
        with self.transaction() as connection:
            return connection.execute(query).all()

    def run(self, statement: Executable) -> int:
        """Run a statement in a separate transaction, and return the number of its rows. Raises DatabaseUnavailableError."""
        with self.transaction() as connection:
            return connection.execute(statement).rowcount

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Use the database in the block, with the tables of this version. Raises DatabaseUnavailableError."""
        with available():
            if not self._is_ready:  # threads that find this at the same time migrate one after the other, and only the first one has to
                url = self.engine.url
                if url.get_backend_name() == "sqlite" and url.database:
                    self.create_file(Path(url.database))
                with self.engine.begin() as connection:
                    migrate(connection)
                self._is_ready = True
            yield

    def create_file(self, file: Path) -> None:
        """Create the file of a new SQLite database. It is private: only this user may read it."""
        file.touch(mode=0o600)


class UsageStore:
    """Writes rows to the database. ``engine`` is for reading: its connections cannot displace the pages that the writer has cached."""

    def __init__(self, url: URL) -> None:
        backend = url.get_backend_name()
        self.gather = _GATHER[backend]
        """Seconds during which rows should be gathered for a large transaction, if there are many."""
        self._batch = _BATCH[backend]
        self.engine = create_database_engine(url)
        self._writer = Database(create_database_engine(url, _WRITER_CACHE))
        self._insertion = Insertion(self.engine.dialect)

    def close(self) -> None:
        self.engine.dispose()
        self._writer.close()

    def write(self, rows: Sequence[UsageRow]) -> int:
        """Write rows and return how many the database cannot store.

        Raises DatabaseUnavailableError; nothing was written then, and the rows must be written again.
        """
        with self._writer.prepared():
            return sum(map(self._write, batches(rows, self._batch)))

    def write_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of engine samples. Raises DatabaseUnavailableError."""
        with self._writer.transaction() as connection:
            write_samples(connection, rows)

    def prune(self, before: datetime) -> bool:
        """Delete the older samples, and replace some of the older rows by their totals; True if there may be more rows.

        Raises DatabaseUnavailableError.
        """
        with self._writer.transaction() as connection:
            replaced = replace_by_totals(connection, before, _PRUNED)
            connection.execute(delete(ENGINE_SAMPLES).where(ENGINE_SAMPLES.c.time < before))
        return replaced == _PRUNED

    def _write(self, rows: Sequence[UsageRow]) -> int:
        try:
            with self._writer.engine.begin() as connection:
                mark_late(connection, rows, time.time())
                for some in batches(rows):  # only their values are in memory at the same time
                    connection.exec_driver_sql(*self._insertion.prepare(some))
        except (SQLAlchemyError, OverflowError, ValueError) as error:
            if not _is_of_a_row(error):
                raise
            if len(rows) > 1:
                half = len(rows) // 2
                return self._write(rows[:half]) + self._write(rows[half:])
            _log.error("the ledger cannot store the row of request %s: %s", rows[0].id, reason(error))
            return 1
        return 0


def migrate(connection: Connection) -> None:
    """Run the missing migrations in the connection's transaction. If several gateways start at once, only one does it."""
    with _MIGRATING:
        connection.exec_driver_sql(_LOCKS[connection.dialect.name])
        upgrade_table(connection)
        config = AlembicConfig()
        config.set_main_option("script_location", str(_MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _is_of_a_row(error: Exception) -> bool:
    """Check whether the error is about a row, and would occur again."""
    before_it_was_sent = isinstance(error, StatementError) and not isinstance(error, DBAPIError)
    return before_it_was_sent or isinstance(error, DataError | IntegrityError | OverflowError | ValueError)


def reason(error: Exception) -> str:
    """Return the driver's message in one line, without values of the statement."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__
