"""The checks of ``vllm-gateway check``: warnings about a valid configuration, and launches that would fail.

This package reports problems and changes nothing.
Start with ``lint`` and ``preflight``.
"""
