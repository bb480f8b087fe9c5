"""The table of the audit log, to which rows can only be added.

Since: 0.1.0
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_FUNCTION = """
CREATE FUNCTION gateway_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'gateway_audit is append-only'; END $$
"""
_TRIGGER = """
CREATE TRIGGER gateway_audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON gateway_audit
FOR EACH STATEMENT EXECUTE FUNCTION gateway_audit_refuse()
"""
_SQLITE_TRIGGER = """
CREATE TRIGGER gateway_audit_no_{0} BEFORE {0} ON gateway_audit
BEGIN SELECT RAISE(ABORT, 'gateway_audit is append-only'); END
"""
_REFUSE = {"postgresql": (_FUNCTION, _TRIGGER), "sqlite": tuple(map(_SQLITE_TRIGGER.format, ("update", "delete")))}


def upgrade() -> None:
    """Create the table, and the triggers that refuse changes of rows."""
    op.create_table(
        "gateway_audit",
        sa.Column("chain", sa.String, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("entry", sa.String, nullable=False),
    )
    op.create_index("gateway_audit_time", "gateway_audit", ["time"])
    for statement in _REFUSE[op.get_context().dialect.name]:
        op.execute(statement)
