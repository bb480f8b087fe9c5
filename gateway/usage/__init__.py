"""The queries of the ledger: usage reports, reconciliations with the engines' counters, and the earlier use of keys and budgets.

The package writes nothing and creates no database, and no worker imports it.
Start with ``queries``, then ``reader``, through which a running gateway queries, and ``reconciliation``.
"""
