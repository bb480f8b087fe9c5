"""The prefix cache of one simulated server: blocks, of which the least recently used are evicted first, and of one prompt's the last first.

The rule: all blocks of a segment are used together, so the cache stores a number of blocks for each segment of a prompt. A test
compares it with a list of blocks, which costs twenty times as much.
"""

from __future__ import annotations

from tests.benchmarks.prefix.traces import BLOCK, Prompt


class Cache:
    """The blocks that one server has. ``capacity``: in tokens."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity // BLOCK
        self._blocks: dict[int, int] = {}  # by node, the least recently used first

    def known(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt are cached, from its start on."""
        tokens = 0
        for node, segment in zip(prompt.nodes, prompt.segments, strict=True):
            cached = self._blocks.get(node, 0) * BLOCK
            tokens += cached
            if cached < segment.tokens:
                break
        return tokens

    def admit(self, prompt: Prompt) -> list[tuple[int, int]]:
        """Store a prompt. Return what was evicted for it: nodes, each with the number of its blocks that are left."""
        for node, segment in zip(reversed(prompt.nodes), reversed(prompt.segments), strict=True):
            blocks = segment.tokens // BLOCK
            self._free -= blocks - self._blocks.pop(node, 0)
            self._blocks[node] = blocks
        evicted = []
        while self._free < 0:
            node, blocks = next(iter(self._blocks.items()))
            left = max(blocks + self._free, 0)
            self._free += blocks - left
            if left:
                self._blocks[node] = left
            else:
                del self._blocks[node]
            evicted.append((node, left))
        return evicted
