"""The tables of people, their sessions, sign-in links, and values that may be used once.

They are in the ledger's migration history, and so have its metadata. A session and a link are no secrets here: a session is
valid only with the signature of its cookie, and a link is stored as the SHA-256 of its token.
"""

from __future__ import annotations

from sqlalchemy import JSON, Column, DateTime, ForeignKey, Index, LargeBinary, String, Table, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB

from gateway.ledger.schema import METADATA

_LIST = JSON().with_variant(JSONB(), "postgresql")

PEOPLE = Table(
    "gateway_people",
    METADATA,
    *(
        Column("id", String, primary_key=True),
        Column("issuer", String, nullable=False),
        Column("subject", String, nullable=False),
        Column("name", String, nullable=False),
        Column("role", String),
        Column("teams", _LIST, nullable=False),
        Column("owned_teams", _LIST, nullable=False),
        Column("created", DateTime(timezone=True), nullable=False),
        Column("last_sign_in", DateTime(timezone=True), nullable=False),
        UniqueConstraint("issuer", "subject", name="gateway_people_issuer_subject"),
    ),
)

SESSIONS = Table(
    "gateway_sessions",
    METADATA,
    *(
        Column("id", String, primary_key=True),
        Column("person", String, ForeignKey("gateway_people.id"), nullable=False),
        Column("port", String, nullable=False),
        Column("sid", String),
        Column("created", DateTime(timezone=True), nullable=False),
        Column("expires", DateTime(timezone=True), nullable=False),
        Column("revoked", DateTime(timezone=True)),
        Column("id_token", String),
        Index("gateway_sessions_person", "person"),
        Index("gateway_sessions_sid", "sid"),
        Index("gateway_sessions_expires", "expires"),
    ),
)

SIGN_IN_LINKS = Table(
    "gateway_sign_in_links",
    METADATA,
    *(
        Column("digest", LargeBinary, primary_key=True),
        Column("subject", String, nullable=False),
        Column("role", String),
        Column("teams", _LIST, nullable=False),
        Column("owned_teams", _LIST, nullable=False),
        Column("created_by", String, nullable=False),
        Column("created", DateTime(timezone=True), nullable=False),
        Column("expires", DateTime(timezone=True), nullable=False),
        Column("used", DateTime(timezone=True)),
    ),
)

USED_ONCE = Table(
    "gateway_sign_in_used",
    METADATA,
    Column("digest", LargeBinary, primary_key=True),
    Column("expires", DateTime(timezone=True), nullable=False),
)
