"""Notices and their delivery, and temporary raises of limits.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "gateway_notices",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("rule", sa.String, nullable=False),
        sa.Column("event", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("due", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("result", sa.String, nullable=False),
    )
    op.create_index("gateway_notices_due", "gateway_notices", ["state", "due"])
    op.create_index("gateway_notices_created", "gateway_notices", ["created"])
    op.create_index("gateway_notices_ends", "gateway_notices", ["ends"])
    op.create_table(
        "gateway_raises",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("raises", sa.String, nullable=False),
        sa.Column("ends", sa.DateTime(timezone=True), nullable=False),
    )
