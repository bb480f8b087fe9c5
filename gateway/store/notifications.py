"""Notice changes of other gateways at once, by PostgreSQL's NOTIFY. Notifications may be lost, so control polls in addition."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.store.database import CHANNEL

_PAUSE = 1.0  # seconds before another attempt to connect, and between two checks for the end
_STOP_TIMEOUT = 3.0


@contextmanager
def notifications(engine: Engine, notify: Callable[[], None]) -> Iterator[None]:
    """Call ``notify`` on a thread when another gateway may have changed something, until the end of the block."""
    stop = threading.Event()
    thread = threading.Thread(target=_listen, args=(engine, notify, stop), name="key-store-listen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_STOP_TIMEOUT)


def _listen(engine: Engine, notify: Callable[[], None], stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(SQLAlchemyError, OSError, _driver_error()):
            _listen_once(engine, notify, stop)
        stop.wait(_PAUSE)


def _listen_once(engine: Engine, notify: Callable[[], None], stop: threading.Event) -> None:
    with engine.connect() as pooled:
        connection = pooled.execution_options(isolation_level="AUTOCOMMIT")
        try:
            connection.exec_driver_sql(f"LISTEN {CHANNEL}")
            notify()  # of what was changed before
            driver = cast(Any, connection.connection.driver_connection)
            while not stop.is_set():
                for _ in driver.notifies(timeout=_PAUSE, stop_after=1):
                    notify()
        finally:
            connection.invalidate()  # no other user of the pool gets a connection that listens


def _driver_error() -> type[Exception]:
    from psycopg import Error  # not for SQLite

    return Error
