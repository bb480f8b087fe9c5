"""Why a request failed, indexes to find requests, totals of deleted rows, and closed months.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
_TIME = sa.DateTime(timezone=True)
_INDEXES = (
    ("gateway_usage_model_time", ["model", "time"], "model IS NOT NULL"),
    ("gateway_usage_team_time", ["team", "time"], "team IS NOT NULL"),
    ("gateway_usage_user_time", ["end_user", "time"], "end_user IS NOT NULL"),
    ("gateway_usage_code_time", ["code", "time"], "code IS NOT NULL"),
    ("gateway_usage_reason_time", ["reason", "time"], "reason IS NOT NULL"),
    ("gateway_usage_failed_time", ["time", "status"], "status >= 400"),
    ("gateway_usage_late", ["day"], "late IS NOT NULL"),
)


def upgrade() -> None:
    """Add the columns and indexes, and create the tables."""
    for name in ("reason", "limit_holder", "detail"):
        op.add_column("gateway_usage", sa.Column(name, sa.String))
    op.add_column("gateway_usage", sa.Column("retries", sa.Integer))
    op.add_column("gateway_usage", sa.Column("failures", sa.String))
    op.add_column("gateway_usage", sa.Column("late", _TIME))
    for name, columns, condition in _INDEXES:
        op.create_index(name, "gateway_usage", columns, sqlite_where=sa.text(condition), postgresql_where=sa.text(condition))
    op.create_table(
        "gateway_usage_totals",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("endpoint", sa.String, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        *(sa.Column(name, sa.String) for name in ("team", "model", "server", "code")),
        sa.Column("labels", _JSON, nullable=False),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("estimated_by", sa.String),
        sa.Column("late", _TIME),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("requests", "incomplete", "estimated_requests")),
        *(sa.Column(f"{name}_tokens", sa.BigInteger, nullable=False) for name in ("prompt", "completion", "cached", "reasoning")),
        *(sa.Column(name, sa.BigInteger) for name in ("cost_high", "cost_low")),
    )
    op.create_index("gateway_usage_totals_day", "gateway_usage_totals", ["day"])
    op.create_table(
        "gateway_usage_months",
        sa.Column("month", sa.String, primary_key=True),
        sa.Column("closed", _TIME, nullable=False),
        sa.Column("hash", sa.String),
    )
    op.create_table(
        "gateway_closed_usage",
        sa.Column("month", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("line", sa.String, nullable=False),
    )
