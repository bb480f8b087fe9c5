"""The HTTP API's tables and shapes: routes, errors, usage fields, media URLs, dialects of requests and responses.

It decides nothing about one gateway: no configuration, no keys, no server, no socket.
Start with ``routes`` and ``errors``; ``reference`` makes the OpenAPI document of them.
"""
