"""Single requests: the list of them, what happened to each, and why a request failed.

It owns the query of single rows and their text for a terminal. It must not sum usage, which ``gateway.usage.queries`` does, and it writes
nothing. Start with ``query``, then ``explanation``.
"""
