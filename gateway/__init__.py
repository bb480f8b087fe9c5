"""Everything that clients and operators use: configuration, keys, request handling, errors, metrics, the command line.

``gateway`` imports ``upstream``. ``upstream`` never imports ``gateway``.
"""

__version__ = "0.1.0"
