"""The dimensions by which usage may be grouped: names for operators, and their columns. Pure, and cheap to import."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.ledger.row import COLUMNS

DIMENSIONS: Mapping[str, str] = dict(sorted((column.dimension, column.name) for column in COLUMNS if column.dimension is not None))
"""The columns of the dimensions, by name."""
LABEL = "label:"
"""The start of a further dimension for each label of keys, before the label's name."""
CHOICES = (*DIMENSIONS, f"{LABEL}NAME")
"""All dimensions, as messages name them."""
_OF_LABEL = re.compile(rf'{LABEL}[^\s"\\\0]{{1,256}}')  # SQLite's paths into JSON cannot contain quotation marks


def is_dimension(name: str) -> bool:
    """Check whether usage may be grouped by a name."""
    return name in DIMENSIONS or _OF_LABEL.fullmatch(name) is not None
