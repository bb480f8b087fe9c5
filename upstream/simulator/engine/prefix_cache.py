"""Which leading tokens of a prompt the server has seen before, in blocks of sixteen.

Owns the memory of prompts. As in vLLM, a block counts only if all blocks before it do, the last token is always
computed again, and a ``cache_salt`` keeps its requests apart. Bounded: the oldest blocks are forgotten.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 16
_MOST_BLOCKS: Final = 65536


class PrefixCache:
    """Chained hashes of the blocks seen, in the order of their last use."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def admit(self, ids: tuple[int, ...], salt: str) -> int:
        """Remember a prompt; the number of its tokens that were known already."""
        known = 0
        unbroken = True
        chain = hash(salt)
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            chain = hash((chain, ids[start : start + BLOCK]))
            unbroken = unbroken and chain in self._blocks
            known += BLOCK if unbroken else 0
            self._blocks.pop(chain, None)
            self._blocks[chain] = None
        while len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return min(known, (len(ids) - 1) // BLOCK * BLOCK) if ids else 0
