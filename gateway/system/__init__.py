"""Functions for Linux and processes in general: logging, signals, file descriptors, the allocator, listening sockets, TLS files.

This package does not depend on models, keys or requests.
Start with ``logs``. The other modules are independent of each other.
"""
