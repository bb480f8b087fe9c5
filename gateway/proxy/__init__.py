"""One inference request, from its headers to its settlement.

It stores nothing between two requests.
Start with ``exchange``: one function handles a request step by step.
"""
