"""The creator of a key: issuer and subject of a person.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the columns, and the index that finds a person's keys."""
    op.add_column("gateway_keys", sa.Column("made_by_issuer", sa.String))
    op.add_column("gateway_keys", sa.Column("made_by_subject", sa.String))
    op.create_index("gateway_keys_made_by", "gateway_keys", ["made_by_issuer", "made_by_subject"])
