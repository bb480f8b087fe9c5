"""The ledger's tables, the same in SQLite and PostgreSQL.

``gateway_usage`` has a row for each request; ``gateway_engine_samples`` has the engines' own token counters, for the reconciliation.

The rule: columns are only changed by a migration (``migrations/``), and a test compares the two. Times are UTC. Money is in whole
billionths of the operator's currency, so sums are exact in both databases.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Date, DateTime, Float, Index, Integer, MetaData, String, Table
from sqlalchemy.dialects.postgresql import JSONB

METADATA = MetaData()
_JSON = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

USAGE = Table(
    "gateway_usage",
    METADATA,
    Column("request_id", String, primary_key=True),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("day", Date, nullable=False),
    Column("key", String, nullable=False),
    Column("team", String),
    Column("model", String),
    Column("server", String),
    Column("endpoint", String, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("status", Integer),
    Column("code", String),
    Column("incomplete", String),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("cached_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    Column("estimated", Boolean, nullable=False),
    Column("total_ms", Float),
    Column("first_token_ms", Float),
    Column("queued_ms", Float),
    Column("cost_nano", BigInteger),
    Column("labels", _JSON, nullable=False),
    Column("end_user", String),
    Column("metadata", _JSON),
    Column("estimated_by", String),
    Column("choices", Integer),
    Column("param", String),
    Column("requested_model", String),
    Index("gateway_usage_time", "time"),
    Index("gateway_usage_key_time", "key", "time"),
)

ENGINE_SAMPLES = Table(
    "gateway_engine_samples",
    METADATA,
    Column("server", String, primary_key=True),
    Column("started", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", BigInteger, primary_key=True, autoincrement=False),
    Column("quiet", Boolean, primary_key=True),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("model", String, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("finished_prompt_tokens", BigInteger, nullable=False),
    Column("finished_completion_tokens", BigInteger, nullable=False),
    Column("responses", BigInteger),
    Index("gateway_engine_samples_time", "time"),
)
