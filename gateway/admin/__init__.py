"""The admin port, the admin socket, the status page and the client for them.

It shows and requests; ``fleet`` and ``control`` act.
Start with ``app``.
"""
