"""One inference request, from its headers to its settlement.

It keeps nothing between two requests.
Start with ``exchange``: one function handles a request in the order in which it happens.
"""
