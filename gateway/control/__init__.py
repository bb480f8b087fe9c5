"""The control process: start and stop, workers, snapshots, reload, readiness.

It never touches a client's bytes. Its observations of servers, engines and identity providers are in ``gateway.monitoring``.
Start with ``serve``, then ``assembly`` for the parts and ``control`` for their connections.
"""
