"""A simulator with vLLM 0.32's wire format, for tests, demos and machines without a GPU.

One process, no model: the text is a function of a seed and of the request, every token is counted, and a server or a single request can be
made to fail in the ways of real servers. The gateway must not import this package; it runs it.
Start with ``behavior`` for the failures,
``app`` for the routes and ``server`` for the process.
"""

from __future__ import annotations

from upstream.simulator.server import main

__all__ = ["main"]
