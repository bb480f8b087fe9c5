"""The tables: a row for each request, and the engines' token counters.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    """Create the tables. The first one may exist, with the columns that ``gateway.ledger.upgrade`` has added."""
    op.create_table(
        "gateway_usage",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("team", sa.String),
        sa.Column("model", sa.String),
        sa.Column("server", sa.String),
        sa.Column("endpoint", sa.String, nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("code", sa.String),
        sa.Column("incomplete", sa.String),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("completion_tokens", sa.BigInteger),
        sa.Column("cached_tokens", sa.BigInteger),
        sa.Column("reasoning_tokens", sa.BigInteger),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("total_ms", sa.Float),
        sa.Column("first_token_ms", sa.Float),
        sa.Column("queued_ms", sa.Float),
        sa.Column("cost_nano", sa.BigInteger),
        sa.Column("labels", _JSON, nullable=False),
        sa.Column("end_user", sa.String),
        sa.Column("metadata", _JSON),
        sa.Column("estimated_by", sa.String),
        sa.Column("choices", sa.Integer),
        if_not_exists=True,
    )
    op.create_index("gateway_usage_time", "gateway_usage", ["time"], if_not_exists=True)
    op.create_index("gateway_usage_key_time", "gateway_usage", ["key", "time"], if_not_exists=True)
    op.create_table(
        "gateway_engine_samples",
        sa.Column("server", sa.String, primary_key=True),
        sa.Column("started", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("slot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("quiet", sa.Boolean, primary_key=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("finished_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("finished_completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("responses", sa.BigInteger),
    )
    op.create_index("gateway_engine_samples_time", "gateway_engine_samples", ["time"])
