"""How much of requests' bodies a relay holds in memory at once.

The rule: a body above ``FREE`` bytes takes what it needs before it is kept, and gives it back when its request is over,
however it ended. Small ones are not counted: there are no more of them than connections.
"""

from __future__ import annotations

FREE = 64 * 1024
"""Bytes of a body that are not counted."""


class BodyMemory:
    """A number of bytes, of which requests take a part."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> bool:
        """Take so many bytes; False, and nothing is taken, where there are not so many."""
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """Give back what was taken."""
        self.held -= size
