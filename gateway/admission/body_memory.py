"""How much of requests' bodies a worker holds in memory at once, and how much of that may be one key's.

The rules: a body above ``FREE`` bytes takes what it needs before it is kept, and gives it back when its request is over, however
it ended; small ones are not counted, since there are no more of them than connections. A key's first body may have all that is
free; with more of them it gets what leaves free a ``_TIMES_FREE``th of what it has, so others find room whatever it does.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE = 64 * 1024
"""Bytes of a body that are not counted."""
_TIMES_FREE = 4


@dataclass(slots=True)
class _HeldBodies:
    """What one holder has."""

    size: int = 0
    bodies: int = 0


class BodyMemory:
    """A number of bytes, of which requests take a part."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._shares: dict[str, _HeldBodies] = {}

    def reserve(self, size: int, holder: str, *, more: bool = False) -> bool:
        """Take so many bytes for a body of a holder, or ``more`` for one that has some; False, and nothing is taken, where it may not."""
        share, left = self._shares.get(holder) or _HeldBodies(), self.limit - self.held - size
        if left < 0 or (share.bodies > more and share.size + size > _TIMES_FREE * left):
            return False
        self.held += size
        share.size += size
        share.bodies += not more
        self._shares[holder] = share
        return True

    def release(self, size: int, holder: str) -> None:
        """Give back what was taken for a body."""
        share = self._shares[holder]
        self.held -= size
        share.size -= size
        share.bodies -= 1
        if not share.bodies:
            del self._shares[holder]
