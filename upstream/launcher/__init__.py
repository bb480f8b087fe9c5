"""Launched servers: start, watch, restart, stop.

It runs in the control process and never touches a client's bytes. This file imports nothing, because ``shim`` runs as a small,
separate program.
Start with ``launcher``, then read ``server`` and ``lifecycle``.
"""
