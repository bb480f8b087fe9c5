"""The tables of keys and teams that are made at run time.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables."""
    _create_entries("gateway_keys", sa.Column("team", sa.String))
    op.create_index("gateway_keys_team", "gateway_keys", ["team"])
    _create_entries("gateway_teams")
    op.create_table("gateway_key_hashes", sa.Column("hash", sa.String, primary_key=True), sa.Column("key", sa.String, nullable=False))
    op.create_index("gateway_key_hashes_key", "gateway_key_hashes", ["key"])
    op.create_table(
        "gateway_key_changes",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("mark", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "gateway_idempotency_keys",
        sa.Column("hash", sa.String, primary_key=True),
        sa.Column("request", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("gateway_idempotency_keys_time", "gateway_idempotency_keys", ["time"])


def _create_entries(name: str, *more: sa.Column[str]) -> None:
    op.create_table(
        name,
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("entry", sa.String, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
        *more,
    )
