"""Run the migration steps for alembic, on the connection of ``store`` and inside its transaction."""

from __future__ import annotations

from alembic import context

from gateway.ledger.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table="gateway_usage_schema",
    transactional_ddl=True,
)
context.run_migrations()
