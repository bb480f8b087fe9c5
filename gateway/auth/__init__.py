"""Authentication and authorization: keys, tokens of identity providers, which model a key may use, what a body may contain.

It does no I/O: keys and key sets arrive with the snapshot.
Start with ``keyring`` for authentication and ``catalog`` for authorization.
"""
