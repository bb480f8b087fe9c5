"""People who sign in, their sessions, and sign-in links.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"

_LIST = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "gateway_people",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("issuer", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("role", sa.String),
        sa.Column("teams", _LIST, nullable=False),
        sa.Column("owned_teams", _LIST, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_sign_in", sa.DateTime(timezone=True), nullable=False),
        sa.UniqueConstraint("issuer", "subject", name="gateway_people_issuer_subject"),
    )
    op.create_table(
        "gateway_sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("person", sa.String, sa.ForeignKey("gateway_people.id"), nullable=False),
        sa.Column("port", sa.String, nullable=False),
        sa.Column("sid", sa.String),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked", sa.DateTime(timezone=True)),
        sa.Column("id_token", sa.String),
    )
    op.create_index("gateway_sessions_person", "gateway_sessions", ["person"])
    op.create_index("gateway_sessions_sid", "gateway_sessions", ["sid"])
    op.create_index("gateway_sessions_expires", "gateway_sessions", ["expires"])
    op.create_table(
        "gateway_sign_in_links",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("role", sa.String),
        sa.Column("teams", _LIST, nullable=False),
        sa.Column("owned_teams", _LIST, nullable=False),
        sa.Column("created_by", sa.String, nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "gateway_sign_in_used",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
    )
