"""Fixtures of the audit log's tests."""

from __future__ import annotations

from tests.support.databases import server, url

__all__ = ["server", "url"]
