"""The queries of the ledger: usage reports, single requests, reconciliations with the engines' counters, and the earlier use of keys.

The package creates no database and writes only the closing of a month, which is in ``gateway.ledger.months``. No worker imports it.
Start with ``queries``, then ``reader``, through which a running gateway queries, and ``reconciliation``.
"""
