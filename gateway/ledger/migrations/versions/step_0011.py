"""An index on requests with another status than 200, instead of failed requests.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_CONDITION = "status <> 200"


def upgrade() -> None:
    """Replace the index."""
    op.drop_index("gateway_usage_failed_time", "gateway_usage")
    condition = sa.text(_CONDITION)
    op.create_index("gateway_usage_status_time", "gateway_usage", ["time", "status"], sqlite_where=condition, postgresql_where=condition)
