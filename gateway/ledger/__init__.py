"""The ledger: a row for each request, in a database from which usage can be billed.

A worker appends a row to its journal in shared memory (``recorder``, ``journal``). One thread of control moves the rows to the
spool on disk (``spool``); another thread writes the spool to the database (``store``, ``writer``). A row is deleted in one place only
when it is safe in the next. It is identified by its request's id, so it may arrive twice and is stored once. Nothing here delays a
request. Reports are not made here, but in ``gateway.usage``.
Start with ``row``, then ``writer``.
"""
