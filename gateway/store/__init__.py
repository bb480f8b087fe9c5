"""Keys and teams that are made at run time: their tables, the decisions about changes, the change log, the local copy.

The rule: a change is one transaction with one row of the change log, and the transactions are serialized. So a gateway that has applied
the log up to a row has exactly the state of that row. Nothing here serves a request, and only control opens the database.
Start with ``service``, then read ``decisions``.
"""
