"""A Redis for the tests of each module, emptied for each test."""

from __future__ import annotations

from tests.support.redis_server import redis_of_module, server

__all__ = ["redis_of_module", "server"]
