"""Read from the ledger when each entry of keys was last used.

One index look-up for each entry, so a table of any size responds. An entry for tokens counts the rows of its subjects.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine, func, inspect, select

from gateway.config import Config
from gateway.key_management.key_list import LastUse, token_entries
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.schema import USAGE, utc
from gateway.usage.database import connected, open_ledger
from gateway.usage.queries import rows_of


def last_use(engine: Engine, keys: Iterable[str], of_tokens: Set[str]) -> dict[str, datetime]:
    """Return by id when each of these entries was last used; unused entries are absent. Raises DatabaseUnavailableError."""
    with connected(engine) as connection:
        if not inspect(connection).has_table(USAGE.name):
            return {}
        newest = {key: select(func.max(USAGE.c.time)).where(rows_of(key, with_subjects=key in of_tokens)) for key in keys}
        found = ((key, connection.execute(statement).scalar()) for key, statement in newest.items())
        return {key: utc(when) for key, when in found if when is not None}


def read_last_use(config: Config, beside: Path) -> LastUse:
    """Return the last use of a configuration's entries from its ledger, in the folder ``beside``, or why it is unknown."""
    assert config.ledger is not None, "there is no ledger"
    try:
        with open_ledger(config.ledger, beside) as engine:
            try:
                return LastUse(last_use(engine, [key.id for key in config.keys], token_entries(config)))
            except DatabaseUnavailableError as error:
                return LastUse(unknown=f"the ledger's database does not respond: {error}")
    except DatabaseUnavailableError:
        return LastUse(unknown="the ledger's database does not exist yet")
