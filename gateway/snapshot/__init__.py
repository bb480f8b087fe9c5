"""The immutable value that tells a worker how to serve, and the socket pair that control uses to send it.

It holds data only: it reads no file and starts nothing.
Start with ``Snapshot``, then read ``link`` for the messages.
"""
