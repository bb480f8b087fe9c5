"""The KV cache of the simulator: which blocks of prompts it has, and which of them are in use.

Owns the memory of prompts. As in vLLM, a block counts only if all blocks before it do, the last token is always computed again, and a
``cache_salt`` keeps its requests apart. A block that a running request uses is not evicted. The other blocks are evicted in the order of
their last use, and those at the end of a prompt before those at its start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

BLOCK_SIZE: Final = 16
BLOCKS: Final = 65536


@dataclass(frozen=True, slots=True)
class Allocation:
    """The blocks of one prompt. ``cached``: the tokens that need not be computed. ``blocks``: the hashes of its full blocks."""

    cached: int
    blocks: tuple[int, ...]


class PrefixCache:
    """Chained hashes of blocks of ``block_size`` tokens, at most ``capacity`` of them unless running requests use more."""

    def __init__(self, block_size: int = BLOCK_SIZE, capacity: int = BLOCKS) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self._users: Counter[int] = Counter()
        self._unused: dict[int, None] = {}  # the least recently used first

    @property
    def used(self) -> int:
        """The blocks that running requests use; a block that several requests share counts once."""
        return len(self._users)

    def allocate(self, ids: tuple[int, ...], salt: str) -> Allocation:
        """Use the blocks of a prompt until ``free``."""
        size = self.block_size
        known = 0
        unbroken = True
        chain = hash(salt)
        blocks = []
        for start in range(0, len(ids) - size + 1, size):
            chain = hash((chain, ids[start : start + size]))
            unbroken = unbroken and (chain in self._unused or chain in self._users)
            known += size if unbroken else 0
            blocks.append(chain)
        for block in blocks:
            self._unused.pop(block, None)
            self._users[block] += 1
        self._evict()
        return Allocation(min(known, (len(ids) - 1) // size * size) if ids else 0, tuple(blocks))

    def free(self, allocation: Allocation) -> None:
        """End the use of a prompt's blocks. They stay cached until others need the space."""
        for block in reversed(allocation.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._unused[block] = None
        self._evict()

    def _evict(self) -> None:
        while self._unused and len(self._users) + len(self._unused) > self.capacity:
            del self._unused[next(iter(self._unused))]
