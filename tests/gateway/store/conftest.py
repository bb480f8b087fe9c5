"""The databases of the store, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.ledger.store import database_url
from gateway.store.database import KeyDatabase
from tests.support.databases import server, url

__all__ = ["server", "url"]


@pytest.fixture
def database(url: str, tmp_path: Path) -> Iterator[KeyDatabase]:
    with closing(KeyDatabase(database_url(url, tmp_path))) as made:
        yield made
