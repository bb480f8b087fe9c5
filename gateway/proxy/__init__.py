"""One inference request, from its headers to its settlement.

It stores nothing between two requests, and leaves the choice of a server to ``upstream.balancing``, by the facts of ``gateway.prompts``.
Start with ``exchange``: one function handles a request step by step.
"""
