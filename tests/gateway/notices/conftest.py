"""The databases, for the tests of this folder."""

from __future__ import annotations

from tests.support.databases import server, url

__all__ = ["server", "url"]
