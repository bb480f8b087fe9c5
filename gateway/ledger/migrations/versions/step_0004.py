"""The invalid field of a refused request, and the requested model.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("gateway_usage", sa.Column("param", sa.String))
    op.add_column("gateway_usage", sa.Column("requested_model", sa.String))
