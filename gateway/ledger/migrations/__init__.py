"""The history of the ledger's table, step by step; alembic runs the steps."""
