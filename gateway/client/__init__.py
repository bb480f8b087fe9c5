"""One client connection: parsing, timeouts, addresses, CORS, decoding of bodies, keep-alive comments.

It does not decide about requests; it hands them to ``proxy`` or to the ASGI application.
Start with ``connection``, then read ``request``.
"""
