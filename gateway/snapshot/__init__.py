"""The immutable value by which a worker serves, and the socket pair over which control sends it.

It holds data only: it reads no file and starts nothing.
Start with ``Snapshot``, then read ``link`` for the messages.
"""
