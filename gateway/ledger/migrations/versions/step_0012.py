"""The nearly used budget of a request.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column."""
    op.add_column("gateway_usage", sa.Column("nearest_limit", sa.String))
