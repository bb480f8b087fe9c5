"""The store's tables, the same in SQLite and PostgreSQL. They have one history of migrations with the ledger's.

``gateway_keys`` and ``gateway_teams`` have a row for each key and team. ``gateway_key_hashes`` keeps a hash from belonging to two keys.
``gateway_key_changes`` is the change log. ``gateway_raises`` has the temporary raises of limits, also of keys and teams of the YAML.
``gateway_idempotency_keys`` has the requests that were sent with an Idempotency-Key.

The rule: an entry is JSON in the form of the configuration's ``keys`` and ``teams``, so a setting is declared once. It contains hashes,
never a key. ``version`` is the number of the entry's last change, so no two states of an ID have the same version. The
creator of a key is in columns beside the entry: it has no effect on requests, so workers never get it.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, Index, String, Table

from gateway.ledger.schema import METADATA


def _entries(name: str, *more: Column[str] | Index) -> Table:
    return Table(
        name,
        METADATA,
        Column("id", String, primary_key=True),
        Column("version", BigInteger, nullable=False),
        Column("entry", String, nullable=False),
        Column("created", DateTime(timezone=True), nullable=False),
        Column("changed", DateTime(timezone=True), nullable=False),
        *more,
    )


KEYS = _entries(
    "gateway_keys",
    Column("team", String),
    Column("made_by_issuer", String),
    Column("made_by_subject", String),
    Index("gateway_keys_team", "team"),
    Index("gateway_keys_made_by", "made_by_issuer", "made_by_subject"),
)
TEAMS = _entries("gateway_teams")

KEY_HASHES = Table(
    "gateway_key_hashes",
    METADATA,
    Column("hash", String, primary_key=True),
    Column("key", String, nullable=False),
    Index("gateway_key_hashes_key", "key"),
)

CHANGES = Table(
    "gateway_key_changes",
    METADATA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("mark", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("id", String, nullable=False),
    Column("time", DateTime(timezone=True), nullable=False),
)

RAISES = Table(
    "gateway_raises",
    METADATA,
    Column("kind", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("raises", String, nullable=False),
    Column("ends", DateTime(timezone=True), nullable=False),
)

IDEMPOTENCY = Table(
    "gateway_idempotency_keys",
    METADATA,
    Column("hash", String, primary_key=True),
    Column("request", String, nullable=False),
    Column("id", String, nullable=False),
    Column("time", DateTime(timezone=True), nullable=False),
    Index("gateway_idempotency_keys_time", "time"),
)
