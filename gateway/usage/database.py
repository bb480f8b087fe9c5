"""Read the ledger's database: open it, bound the time of its queries, and wait for them on a separate thread.

The rules: reading creates no database. A query is ended by the database after its time. A thread whose database hangs does not keep the
process alive.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from sqlalchemy import Connection, Engine

from gateway import config as conf
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.store import available, create_database_engine, database_url
from upstream.daemon_thread import run_in_daemon_thread

_STEPS_BETWEEN_CHECKS = 10_000  # steps of SQLite's virtual machine between two checks of a query's time
T = TypeVar("T")


@contextmanager
def open_ledger(settings: conf.Ledger, beside: Path) -> Iterator[Engine]:
    """Open the ledger of a configuration in the folder ``beside``. Raises DatabaseUnavailableError."""
    url = database_url(settings.url.get_secret_value(), beside)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():  # a query would create it
        raise DatabaseUnavailableError(f"there is no file {url.database}; the gateway creates it with its first row")
    engine = create_database_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """Connect for queries. Raises DatabaseUnavailableError if a query fails."""
    with available(), engine.connect() as connection:
        yield connection


def connected_work(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, which opens connections itself. Raises DatabaseUnavailableError if one of its queries fails."""
    with available():
        return work()


@contextmanager
def time_limited(engine: Engine, seconds: float) -> Iterator[Connection]:
    """Connect for queries that the database ends after ``seconds``. Raises DatabaseUnavailableError if a query fails."""
    with connected(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {math.ceil(seconds * 1000)}")
            yield connection
            return
        deadline, driver = time.monotonic() + seconds, cast(sqlite3.Connection, connection.connection.driver_connection)
        driver.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_CHECKS)
        try:
            yield connection
        finally:
            driver.set_progress_handler(None, 0)


async def run_in_thread(work: Callable[[], T], seconds: float) -> T:
    """Return what ``work`` returns, or raise what it raises.

    Raises DatabaseUnavailableError after ``seconds``; the work then continues.
    """
    try:
        async with asyncio.timeout(seconds):
            return await run_in_daemon_thread(work, "ledger-query")
    except TimeoutError:
        raise DatabaseUnavailableError(f"no response within {seconds:g} s") from None
