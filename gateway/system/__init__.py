"""Linux and process concerns without any domain: logging, signals, file descriptors, the allocator, listening sockets, TLS files.

It knows no models, keys or requests.
Start with ``logs``; each other module stands alone.
"""
