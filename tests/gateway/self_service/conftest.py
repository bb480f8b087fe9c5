"""The database server, for the tests of this folder."""

from __future__ import annotations

from tests.support.databases import server

__all__ = ["server"]
