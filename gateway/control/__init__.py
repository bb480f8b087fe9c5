"""The control process: start and stop, workers, reload, discovery, health.

It never touches a client's bytes.
Start with ``serve``, then ``assembly`` for the parts and ``control`` for their connections.
"""
