"""The tables of totals and of closed months.

``gateway_usage_totals`` has the sums of deleted rows, by day and by all dimensions of reports but the end user: clients choose those, so
their number has no bound. ``gateway_usage_months`` has the closed months, and ``gateway_closed_usage`` the lines of their reports.

The rules: a row is in ``gateway_usage`` or counted in the totals, never in both. A line of a report is stored as the text that is hashed.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, Index, Integer, String, Table

from gateway.ledger.row import COLUMNS
from gateway.ledger.schema import METADATA, USAGE

_WITHOUT_BOUND = "user"
GROUPS = (
    *(column.name for column in COLUMNS if column.dimension not in (None, _WITHOUT_BOUND)),
    *("labels", "estimated", "estimated_by", "late"),
)
"""The columns of the ledger by which totals are grouped."""

SUMS = ("requests", "incomplete", "estimated_requests", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
"""The columns of a total that are sums. The cost is ``cost_high`` times 2^32 plus ``cost_low``; both are NULL if no row had a cost."""
COST = ("cost_high", "cost_low")

TOTALS = Table(
    "gateway_usage_totals",
    METADATA,
    Column("id", String, primary_key=True),
    *(Column(name, USAGE.c[name].type, nullable=USAGE.c[name].nullable) for name in GROUPS),
    *(Column(name, BigInteger, nullable=False) for name in SUMS),
    *(Column(name, BigInteger) for name in COST),
    Index("gateway_usage_totals_day", "day"),
)

MONTHS = Table(
    "gateway_usage_months",
    METADATA,
    Column("month", String, primary_key=True),
    Column("closed", DateTime(timezone=True), nullable=False),
    Column("hash", String),
)
"""``hash`` is NULL while the report is being made."""

CLOSED = Table(
    "gateway_closed_usage",
    METADATA,
    Column("month", String, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("line", String, nullable=False),
)
