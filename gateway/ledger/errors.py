"""Errors of the ledger."""

from __future__ import annotations


class DatabaseUnavailableError(Exception):
    """The database does not respond or accepts no rows; the text says why."""


class MonthError(Exception):
    """A month cannot be closed or does not exist; the text says why."""


class SpoolLockedError(Exception):
    """Another gateway uses the spool's folder."""
