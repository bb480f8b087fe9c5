"""Differential fuzzing: the gateway and an independent implementation read the same bytes, in any reads, and must read the same.

Start with ``registry.py``, the targets. ``references.py`` has the references for HTTP: h11, and llhttp with a new parser for each message.
No reference may import from ``gateway`` or ``upstream``.
"""
