"""The table, with a row for each request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    """Create the table."""
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
    )
    op.create_index("gateway_usage_time", "gateway_usage", ["time"])
    op.create_index("gateway_usage_key_time", "gateway_usage", ["key", "time"])
