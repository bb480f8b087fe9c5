"""Fixtures with the two databases that the ledger may be kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import postgres


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Postgres]:
    if not postgres.installed():
        pytest.skip(postgres.NOT_INSTALLED)
    with postgres.postgres() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/usage.db"
    make: Callable[[], str] = request.getfixturevalue("server").database
    return make()
