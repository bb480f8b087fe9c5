"""Parts of statements that both databases understand: insertions that handle conflicts, and batches of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")
_BATCH = 500  # values of a statement


def insert_into(table: Table, dialect: str) -> postgresql.Insert | sqlite.Insert:
    """Return an insertion of the dialect, which can handle conflicts."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def batches(values: Sequence[T], size: int = _BATCH) -> Iterator[Sequence[T]]:
    """Yield the values in their order, in parts that one statement can take."""
    return (values[start : start + size] for start in range(0, len(values), size))
