"""Launched servers: start, watch, restart, stop.

It runs in the control process and never touches a client's bytes. This file imports nothing, because ``shim`` runs as a small
program of its own. Start with ``launcher``, then read ``server`` and ``lifecycle``.
"""
