"""The error of an invalid query."""

from __future__ import annotations


class QueryError(Exception):
    """A query is invalid; the text tells the operator why."""
