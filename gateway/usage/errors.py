"""The error of an invalid query."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gateway.config.problems import did_you_mean


class QueryError(Exception):
    """A query is invalid; the text tells the operator why."""


def check_parameters(given: Iterable[str], known: Collection[str]) -> None:
    """Raise QueryError for an unknown parameter of a query."""
    for name in given:
        if name not in known:
            raise QueryError(f"there is no parameter {name}{did_you_mean(name, known)}")
