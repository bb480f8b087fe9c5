"""What keys may use: counted when a request comes, and set right when it is over.

The rule: what was taken for a request is settled once, on whatever way it ends. ``rules`` decides and knows no clock and
no memory; ``meters`` keeps the counts in memory that all workers of a gateway share, ``store`` in a Redis that several
gateways share; a ``Reservation`` is one request's share in both.
"""

from gateway.limits.limiter import Limiter
from gateway.limits.reservation import Reservation

__all__ = ["Limiter", "Reservation"]
