"""The ledger: a row for each request, kept where it can be billed from.

The way of a row: a worker appends it to its journal (``journal``, ``books``), in shared memory; a thread of control moves what
the journals hold into the spool on disk (``spool``); another one writes the spool into the database (``store``, ``writer``).
A row is let go of in one place only when it is safe in the next, and is known by its request's id, so it may arrive
twice and is kept once.
"""
