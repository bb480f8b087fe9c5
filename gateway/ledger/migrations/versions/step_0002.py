"""Add the method by which the tokens of a row were estimated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column. It stays empty in older rows, because changing all rows of a large table would take too long."""
    op.add_column("gateway_usage", sa.Column("estimated_by", sa.String))
