"""One client connection of the data port: HTTP parsing, timeouts, addresses, TLS, CORS, keep-alive comments.

The package turns bytes into requests and responses into bytes. It decides nothing about keys, models or servers.
Start with ``connection``, then ``http``, which parses without I/O.
"""
