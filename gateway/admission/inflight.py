"""Limit concurrent requests: each worker's part of the limits that the configuration sets for the whole gateway.

The rule: the parts of all workers add up to the whole, if that is enough for one each. So the limit on all requests holds without
communication between workers. It is checked before the body is read, and no request is queued for it. Workers share the limits of servers
(upstream/balancing/shared_limit.py); if all servers are at capacity, the request is queued for its model (queue.py).
"""

from __future__ import annotations

from gateway.api.errors import Refusal

_TIMES_FREE = 4
"""While capacity is short, a key may use at most this many times the free capacity: one key 4/5 of all, two keys 4/9 each."""
_LITTLE = 0.25
"""A key with less than this part of the whole is light. Other keys must leave capacity for it."""
_REMEMBERED = 60.0
"""Seconds for which capacity is reserved after the last request of a light key."""


def worker_share(whole: int, number: int, of: int) -> int:
    """Return a worker's part of a limit. The first workers get the remainder of the division.

    It is at least 1: until a restart changes the number of workers, a configuration may have fewer slots than workers.
    """
    return max(whole // of + (number % of < whole % of), 1)


class ConcurrencyLimit:
    """The limit on all requests of a worker.

    A single key may use all of it. When it is full and a light key is refused, free capacity is shared by a dynamic threshold
    (Choudhury and Hahne, 1998): heavy keys are rejected until enough capacity is free, which comes as their requests finish.
    Only the requesting key is counted.
    """

    __slots__ = ("_most", "_shared_until")

    def __init__(self, most: int) -> None:
        self._most = most
        self._shared_until = 0.0

    def admit(self, in_flight: int, own: int, now: float) -> None:
        """Admit a request, or raise Refusal overloaded.

        ``in_flight`` counts the requests of this worker including this request, ``own`` the other requests of its key; ``now`` is
        ``time.monotonic``.
        """
        free = self._most - in_flight + 1
        if own < _LITTLE * self._most and (free <= 0 or now < self._shared_until):
            self._shared_until = now + _REMEMBERED
        if free <= 0 or (now < self._shared_until and own >= _TIMES_FREE * free):
            raise Refusal("overloaded", "The gateway has as many requests as it can take. Try again in a moment.")
