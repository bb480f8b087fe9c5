"""The cached share that exact knowledge of all caches reaches: recorded requests, replayed on caches that work as vLLM's.

The oracle sends each request to the server that has most of its prompt cached, and of several such servers to the server that has computed
least. Requests come one at a time, so no server has a backlog. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request: the token IDs of its prompt and of its completion, and its salt."""

    prompt: Sequence[int]
    completion: Sequence[int]
    salt: str | None = None

    def blocks(self, size: int) -> list[int]:
        """Return a number for each full block; equal numbers mean equal tokens up to there."""
        tokens, found, key = [*self.prompt, *self.completion[:-1]], [], hash(self.salt)
        for end in range(size, len(tokens) + 1, size):
            key = hash((key, *tokens[end - size : end]))
            found.append(key)
        return found


@dataclass(slots=True)
class Cache:
    """One server's blocks, the least recently used first. vLLM reserves one of its blocks, and evicts the end of a request first."""

    capacity: int
    computed: int = 0
    _blocks: dict[int, None] = field(default_factory=dict)

    def cached(self, request: Recorded, size: int) -> int:
        """Return the cached tokens of a prompt. vLLM always computes the last token."""
        most = (len(request.prompt) - 1) // size
        found = 0
        for block in request.blocks(size)[:most]:
            if block not in self._blocks:
                break
            found += 1
        return found * size

    def serve(self, request: Recorded, size: int) -> None:
        """Store the blocks of a request."""
        self.computed += len(request.prompt) - self.cached(request, size)
        for block in reversed(request.blocks(size)):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self.capacity:
            del self._blocks[next(iter(self._blocks))]


def cached_share(requests: Iterable[Recorded], servers: int, blocks: int, size: int) -> float:
    """Return the share of prompt tokens that were cached. ``blocks``: of each server, with ``size`` tokens each."""
    caches = [Cache(blocks - 1) for _ in range(servers)]
    cached = prompts = 0
    for request in requests:
        best = max(caches, key=lambda cache: (cache.cached(request, size), -cache.computed))
        cached += best.cached(request, size)
        prompts += len(request.prompt)
        best.serve(request, size)
    return cached / prompts
