"""A Redis for the tests of each module, emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """Return the shared server, emptied."""
    with shared.client() as each:
        each.flushall()
    return shared
