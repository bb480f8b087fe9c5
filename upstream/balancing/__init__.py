"""The servers of a model: which one gets a request, what counts against a server, when a request is sent again.

It does not know what a request contains.
Start with ``pool`` for the choice and ``attempt`` for the request.
"""
