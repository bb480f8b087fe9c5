"""The ledger's tables, the same in SQLite and PostgreSQL.

``gateway_usage`` has a row for each request; ``gateway_engine_samples`` has the engines' own token counters, for the reconciliation. The
tables of totals and closed months are in ``months/tables.py``.

The rule: the columns of ``gateway_usage`` are those that ``UsageRow`` declares. A migration (``migrations/``) adds them to existing
databases, and a test compares the two. Times are UTC. Money is in whole
billionths of the operator's currency, so sums are exact in both databases.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Column, Date, DateTime, Float, Index, Integer, MetaData, String, Table, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from gateway.ledger.column import Kind
from gateway.ledger.row import COLUMNS, NULLABLE

METADATA = MetaData()

_TYPES: Mapping[Kind, TypeEngine[Any]] = {
    Kind.TEXT: String(),
    Kind.NUMBER: Integer(),
    Kind.COUNT: BigInteger(),
    Kind.FLAG: Boolean(),
    Kind.JSON: JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql"),
    Kind.TIME: DateTime(timezone=True),
    Kind.LATER_TIME: DateTime(timezone=True),
    Kind.DAY: Date(),
    Kind.MILLISECONDS: Float(),
    Kind.COST: BigInteger(),
    Kind.IS_GIVEN: Boolean(),
}

PARTIAL_INDEXES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "gateway_usage_model_time": (("model", "time"), "model IS NOT NULL"),
    "gateway_usage_team_time": (("team", "time"), "team IS NOT NULL"),
    "gateway_usage_user_time": (("end_user", "time"), "end_user IS NOT NULL"),
    "gateway_usage_code_time": (("code", "time"), "code IS NOT NULL"),
    "gateway_usage_reason_time": (("reason", "time"), "reason IS NOT NULL"),
    "gateway_usage_status_time": (("time", "status"), "status <> 200"),
    "gateway_usage_late": (("day",), "late IS NOT NULL"),
}
"""The indexes by which requests are found, with their columns and their rows. An ordinary request has an entry in few of them."""

USAGE = Table(
    "gateway_usage",
    METADATA,
    *(Column(each.name, _TYPES[each.kind], primary_key=each.name == "request_id", nullable=each.name in NULLABLE) for each in COLUMNS),
    Index("gateway_usage_time", "time"),
    Index("gateway_usage_key_time", "key", "time"),
    *(
        Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))
        for name, (columns, condition) in PARTIAL_INDEXES.items()
    ),
)

COUNTERS: Mapping[str, str] = {
    **{name: f"{name}_tokens" for name in ("prompt", "completion", "finished_prompt", "finished_completion")},
    "responses": "responses",
}
"""The counters of an engine, and the column of each. Only ``responses`` may be unknown."""

ENGINE_SAMPLES = Table(
    "gateway_engine_samples",
    METADATA,
    Column("server", String, primary_key=True),
    Column("started", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", BigInteger, primary_key=True, autoincrement=False),
    Column("quiet", Boolean, primary_key=True),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("model", String, nullable=False),
    *(Column(each, BigInteger, nullable=name == "responses") for name, each in COUNTERS.items()),
    Index("gateway_engine_samples_time", "time"),
)


def utc(moment: datetime) -> datetime:
    """Return a time of the database in UTC. SQLite stores no zone, and PostgreSQL returns times in the zone of the session."""
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
