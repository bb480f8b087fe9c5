"""How much is let in: each worker's part of the bounds that the configuration sets for the whole gateway.

The rule: the parts of all workers are exactly the whole, where it is enough for one each, so a bound holds without the workers' asking
each other. The bound on all requests together is judged before the body is read, and nobody waits for it; that on a server is kept by
its pool (upstream/balancing/pool.py), and who finds all servers full waits in their model's room (waiting.py).
"""

from __future__ import annotations

from gateway.api.errors import Refusal

_TIMES_FREE = 4
"""While others want in, a key may have so many times what is free: one key four fifths of all, two keys four ninths each."""
_LITTLE = 0.25
"""A key with less than this part of the whole is one that others must leave room for."""
_REMEMBERED = 60.0
"""Seconds for which room is left after the last request of such a key."""


def worker_share(whole: int, number: int, of: int) -> int:
    """How much of a bound is worker ``number``'s, of so many workers; the first ones get what cannot be divided. It is never nothing:
    a bound for fewer workers may be read while those before serve on, until the restart that their number needs."""
    return max(whole // of + (number % of < whole % of), 1)


class ConcurrencyLimit:
    """The bound on all requests of a worker.

    A key that is alone may have all of it. When it is full and somebody is turned away who has little, what is free is shared out by
    a threshold that moves with it (Choudhury and Hahne, 1998): who has much comes in no more until enough is free for others, and as
    his requests end there is. Nobody is counted but the one who asks.
    """

    __slots__ = ("_most", "_shared_until")

    def __init__(self, most: int) -> None:
        self._most = most
        self._shared_until = 0.0

    def admit(self, under_way: int, own: int, now: float) -> None:
        """Let a request in, which is one of so many under way in this worker, and whose key has ``own`` of the others.

        ``now`` is ``time.monotonic``. Raises Refusal overloaded.
        """
        free = self._most - under_way + 1
        if own < _LITTLE * self._most and (free <= 0 or now < self._shared_until):
            self._shared_until = now + _REMEMBERED
        if free <= 0 or (now < self._shared_until and own >= _TIMES_FREE * free):
            raise Refusal("overloaded", "The gateway has as many requests as it can take. Try again in a moment.")
