"""A column of the ledger, as a field of ``UsageRow`` declares it.

The rule: a column is declared once, on its field. The schema, the insertion, the dimensions of reports and the table in docs/usage.md are
derived from the declaration. Only the migration that adds the column to existing databases is separate, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """The type of a column in the database, and how the field's value becomes the column's."""

    TEXT = auto()
    NUMBER = auto()
    """A whole number of 32 bits."""
    COUNT = auto()
    """A whole number of 64 bits."""
    FLAG = auto()
    JSON = auto()
    TIME = auto()
    """From seconds since the epoch: the time of arrival in UTC."""
    LATER_TIME = auto()
    """From seconds since the epoch or None: another time in UTC."""
    DAY = auto()
    """From seconds since the epoch: the day in UTC."""
    MILLISECONDS = auto()
    """From seconds."""
    COST = auto()
    """From the price: the cost of the row, in whole billionths of the currency."""
    IS_GIVEN = auto()
    """From any value: whether it is not None."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. ``content`` describes it in docs/usage.md. ``dimension``: the name by which reports group by it."""

    name: str
    content: str
    kind: Kind = Kind.TEXT
    dimension: str | None = None
