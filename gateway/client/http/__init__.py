"""HTTP/1.1 as the data port speaks it, without I/O: parsed requests, status lines, content encodings, CORS headers.

The package reads and makes bytes; it owns no connection and waits for nothing.
Start with ``framing``.
"""
