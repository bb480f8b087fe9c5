"""The ID of a request's trace, and the servers that were lost during its stream.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("gateway_usage", sa.Column("trace_id", sa.String))
    op.add_column("gateway_usage", sa.Column("continuations", sa.String))
