"""The history of the ledger's table, step by step; alembic runs the steps.

The docstring of a step is its row in docs/operators/upgrades.md: the change, and the first version with it.
"""
