"""The control process: start, stop, workers, reload, discovery, health.

It never touches a client's bytes.
Start with ``serve``, then ``control``.
"""
