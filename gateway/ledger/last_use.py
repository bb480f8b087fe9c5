"""When each entry of keys was used last, from the ledger's table.

Reading only: a look into the index for each entry, so that a table of any size answers; of an entry for tokens, the rows of its subjects.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Select, func, inspect, or_, select
from sqlalchemy.exc import SQLAlchemyError

from gateway.config import Config
from gateway.key_management.key_list import LastUse, token_entries
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.queries import rows_of
from gateway.ledger.schema import USAGE
from gateway.ledger.store import create_database_engine, database_url, reason


def last_use(way: Engine, keys: Iterable[str], of_tokens: frozenset[str]) -> dict[str, datetime]:
    """By id, when each of these entries was used last; one that never was is not there. Raises DatabaseUnavailableError."""
    try:
        with way.connect() as connection:
            if not inspect(connection).has_table(USAGE.name):
                return {}
            found = ((key, connection.execute(_newest(key, key in of_tokens)).scalar()) for key in keys)
            return {key: when if when.tzinfo else when.replace(tzinfo=UTC) for key, when in found if when is not None}
    except SQLAlchemyError as error:
        raise DatabaseUnavailableError(reason(error)) from error


def _newest(key: str, of_tokens: bool) -> Select[Any]:
    own, of_subjects = rows_of(key)
    return select(func.max(USAGE.c.time)).where(or_(own, of_subjects) if of_tokens else own)


def known_last_use(way: Engine, config: Config) -> LastUse:
    """The last use of a configuration's entries, or why it is not known."""
    try:
        return LastUse(last_use(way, [key.id for key in config.keys], token_entries(config)))
    except DatabaseUnavailableError as error:
        return LastUse(unknown=f"the ledger's database does not answer: {error}")


def read_last_use(config: Config, beside: Path) -> LastUse:
    """As ``known_last_use``, of a configuration that has a ledger and is in the folder ``beside``."""
    assert config.ledger is not None, "there is no ledger to be asked"
    url = database_url(config.ledger.url.get_secret_value(), beside)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        return LastUse(unknown="the ledger's database is not there yet")  # asking would make the file
    way = create_database_engine(url)
    try:
        return known_last_use(way, config)
    finally:
        way.dispose()
