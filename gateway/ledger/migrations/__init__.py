"""How the ledger's table came to be what it is, step by step; alembic takes the steps."""
