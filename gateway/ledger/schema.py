"""The ledger's one table, the same in SQLite and PostgreSQL, and what a row becomes in it.

The rule: columns are only changed by a migration (``migrations/``), and a test holds the two together. Times are UTC, and money is
in whole billionths of the operator's currency, so that sums are exact in both databases.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Column, Date, DateTime, Float, Index, Integer, MetaData, String, Table
from sqlalchemy.dialects.postgresql import JSONB

from gateway.ledger.row import Row

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
    Index("gateway_usage_time", "time"),
    Index("gateway_usage_key_time", "key", "time"),
)


def values(row: Row) -> dict[str, Any]:
    """The columns of a row."""
    time = datetime.fromtimestamp(row.started, UTC)
    completion, estimated = row.generated
    return {
        "request_id": row.id,
        "time": time,
        "day": time.date(),
        "key": row.key,
        "team": row.team,
        "model": row.model,
        "server": row.server,
        "endpoint": row.endpoint,
        "stream": row.stream,
        "status": row.status,
        "code": row.code,
        "incomplete": row.incomplete,
        "prompt_tokens": row.prompt,
        "completion_tokens": completion,
        "cached_tokens": row.cached,
        "reasoning_tokens": row.reasoning,
        "estimated": estimated,
        "total_ms": _ms(row.duration),
        "first_token_ms": _ms(row.first_token),
        "queued_ms": _ms(row.queued),
        "cost_nano": row.cost,
        "labels": row.labels,
        "end_user": row.user,
        "metadata": row.metadata,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
