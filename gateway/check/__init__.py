"""What ``vllm-gateway check`` finds: warnings about a valid configuration, and launches that would fail.

It reports problems and changes nothing.
Start with ``lint`` and ``preflight``.
"""
