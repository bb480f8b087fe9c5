"""What stands behind the gateway: servers, processes, bytes and deadlines.

Nothing here knows of keys, limits or Prometheus, and nothing here imports ``gateway``.
"""
