"""The ID of a request's trace.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the column."""
    op.add_column("gateway_usage", sa.Column("trace_id", sa.String))
