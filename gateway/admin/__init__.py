"""The admin port, the admin socket and the client for them.

It shows the state and passes on operations; ``fleet`` and ``control`` perform them.
Start with ``app``.
"""
