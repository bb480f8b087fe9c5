"""The HTTP API's tables and shapes: routes, errors, usage fields, media URLs, dialects of requests and responses.

It does not depend on a particular gateway: it uses no configuration, no keys, no server and no socket.
Start with ``routes`` and ``errors``; ``reference`` builds the OpenAPI document from them, and ``vllm`` knows what vLLM's API does.
"""
