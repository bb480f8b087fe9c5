"""What clients and operators meet: configuration, keys, the request's story, errors, metrics, the command line.

``gateway`` imports ``upstream``; never the other way round.
"""

__version__ = "0.1.0"
