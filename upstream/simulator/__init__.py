"""A stand-in that speaks vLLM 0.32's wire format, for tests, demos and machines with no GPU.

One process, no model: the text is a function of a seed and of the request, every token is counted, and a
server or a single request can be made to fail in the ways of real servers. See ``behavior`` for those
and ``server`` for the process. Nothing of the gateway imports this package; it is run, never called.
"""

from __future__ import annotations

from upstream.simulator.server import main

__all__ = ["main"]
