"""The engines' token counters, and the number of choices of a request, for the reconciliation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column and the table."""
    op.add_column("gateway_usage", sa.Column("choices", sa.Integer))
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
