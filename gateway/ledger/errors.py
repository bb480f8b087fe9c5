"""What can go wrong with the ledger."""

from __future__ import annotations


class DatabaseUnavailableError(Exception):
    """The database does not answer or takes nothing at the moment; the text says why."""


class QueryError(Exception):
    """A question cannot be answered; the text tells the operator why."""


class SpoolLockedError(Exception):
    """Another gateway has the spool's folder."""
