"""The behavior of vLLM's API: how it reads integers and choices, counts a prompt, and reports errors.

Each fact comes from vLLM's source and is checked against the real vLLM; the package uses no configuration, no server and no socket.
Start with ``errors``, which maps vLLM's errors to those of ``gateway.api.errors``.
"""
