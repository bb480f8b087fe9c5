"""How much is let in: each relay's part of the bounds that the configuration sets for the whole gateway.

The rule: the parts of all relays are exactly the whole, so a bound holds without the relays' asking each other. The bound on all
requests together is judged before the body is read, and nobody waits for it; that on a server is kept by its pool
(upstream/pool.py), and who finds all servers full waits in their model's room (waiting.py).
"""

from __future__ import annotations

from gateway.call import Call
from gateway.errors import Refusal


def part(whole: int, number: int, of: int) -> int:
    """How much of a bound is relay ``number``'s, of so many relays; the first ones get what cannot be divided."""
    return whole // of + (number % of < whole % of)


def bound(call: Call, most: int) -> None:
    """Let a request in when no more than ``most`` are under way in this relay. Raises Refusal overloaded."""
    if call.under_way > most:
        raise Refusal("overloaded", "The gateway has as many requests as it can take. Try again in a moment.")
