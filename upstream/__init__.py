"""The servers behind the gateway: HTTP, balancing, vLLM, launching, discovery, and a simulator.

It does not depend on keys, limits or Prometheus, and must not import ``gateway``.
Start with ``balancing.pool`` for the servers of a model, and ``launcher`` for their processes.
"""
