"""Rate limits and budgets of keys: reserved when a request arrives, settled when it finishes.

The rule: what was reserved for a request is settled exactly once, however the request ends. Nothing here sends a request or knows
HTTP.
Start with ``decision``, which decides. ``shared_counts`` keeps the counts in memory that all workers share, and ``redis`` in a Redis that
several gateways share; a worker may have a ``lease`` from it. A ``Reservation`` is what one request has reserved in either.
"""

from gateway.limits.limiter import Limiter
from gateway.limits.reservation import Reservation

__all__ = ["Limiter", "Reservation"]
