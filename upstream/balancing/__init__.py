"""The servers of a model: the choice of a server, its ejection after failures, and retries.

It does not depend on the content of a request.
Start with ``pool`` for the choice and ``attempt`` for the request.
"""
