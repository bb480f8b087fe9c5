"""Limit the memory for request bodies of a worker, and each key's part of it.

The rules: a body larger than ``FREE`` reserves its memory before it is stored, and releases it when its request ends, however it ends.
Small bodies are not counted; their number is limited by the number of connections. A key's first body may use all that is free. For more
bodies, a ``_TIMES_FREE``th of the memory that the key holds must stay free, so other keys still get memory.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE = 64 * 1024
"""Body bytes that need no memory reservation."""
_TIMES_FREE = 4


@dataclass(slots=True)
class _HeldBodies:
    """The memory that one holder has reserved."""

    size: int = 0
    bodies: int = 0


class BodyMemory:
    """The memory for bodies, of which requests reserve parts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._held_by: dict[str, _HeldBodies] = {}

    def reserve(self, size: int, holder: str, *, more: bool = False) -> bool:
        """Reserve bytes for a body of a holder, or ``more`` for a body that has some.

        Returns False without a reservation if the holder would exceed its part.
        """
        if not self.is_available(size, holder, more=more):
            return False
        held = self._held_by.get(holder) or _HeldBodies()
        self.held += size
        held.size += size
        held.bodies += not more
        self._held_by[holder] = held
        return True

    def is_available(self, size: int, holder: str, *, more: bool = False) -> bool:
        """Return whether ``reserve`` would succeed now."""
        held, free = self._held_by.get(holder) or _HeldBodies(), self.limit - self.held - size
        return free >= 0 and not (held.bodies > more and held.size + size > _TIMES_FREE * free)

    def reserve_spare(self, size: int, holder: str) -> bool:
        """Reserve bytes for the copy of a body, if half of the memory stays free for the bodies of clients."""
        return self.held + size <= self.limit // 2 and self.reserve(size, holder)

    def release(self, size: int, holder: str) -> None:
        """Release the memory that a body has reserved."""
        held = self._held_by[holder]
        self.held -= size
        held.size -= size
        held.bodies -= 1
        if not held.bodies:
            del self._held_by[holder]
