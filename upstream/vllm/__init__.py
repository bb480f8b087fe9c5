"""Facts about vLLM: command line, names, GPUs, metrics, health and failures.

It starts no process; ``launcher`` does.
Start with ``command_line`` and ``health``.
"""
