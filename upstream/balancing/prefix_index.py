"""The prefix index: which blocks of prompts each server of a model has in its cache, as far as this process knows.

A block is named by its key, a 64-bit number that also depends on all blocks before it. Equal keys therefore mean equal prompts up to that
block. The rules: a server has at most ``capacity`` blocks, and the least recently used one is removed first, the last of a prompt before
those at its start, as in vLLM. All servers together have at most ``limit`` blocks. A server that is removed leaves nothing behind. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

LIMIT = 1_000_000
"""Blocks of all servers of a model together: about 150 MB in each worker."""
DEFAULT_CAPACITY = 2_048
"""Blocks of a server whose cache size is unknown: 262,144 tokens in blocks of 512 characters."""
_MOST_NAMES = 1024


@dataclass(slots=True, eq=False)
class _ServerBlocks:
    """The blocks of one server, the least recently used first. ``bit``: its bit in the masks of the index."""

    bit: int
    capacity: int
    blocks: dict[int, None] = field(default_factory=dict)


class PrefixIndex:
    """The cached blocks of the servers of one model, by the servers' names."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._servers: dict[str, _ServerBlocks] = {}
        self._by_bit: dict[int, str] = {}
        self._owners: dict[int, int] = {}  # key → mask of the servers that have the block
        self._names: dict[int, tuple[str, ...]] = {}  # mask → the servers' names
        self.size = 0
        """Blocks of all servers together."""

    def add_server(self, name: str, capacity: int = DEFAULT_CAPACITY) -> None:
        """Add a server without blocks, or change the capacity of a known one."""
        if (server := self._servers.get(name)) is None:
            bit = next(1 << position for position in range(len(self._servers) + 1) if 1 << position not in self._by_bit)
            self._by_bit[bit] = name
            self._names.clear()
            self._servers[name] = _ServerBlocks(bit, capacity)
        else:
            server.capacity = capacity
        self._shrink()

    def remove_server(self, name: str) -> None:
        """Remove a server and its blocks."""
        self.clear(name)
        if (server := self._servers.pop(name, None)) is not None:
            del self._by_bit[server.bit]
            self._names.clear()

    def blocks(self, name: str) -> Sequence[int]:
        """Return the keys of a server's blocks, the least recently used first."""
        server = self._servers.get(name)
        return () if server is None else tuple(server.blocks)

    def insert(self, name: str, keys: Sequence[int]) -> None:
        """Record that a server has used these blocks of one prompt, in the order of the prompt. An unknown server is ignored."""
        if (server := self._servers.get(name)) is None:
            return
        blocks, bit, owners = server.blocks, server.bit, self._owners
        before = len(blocks)
        for key in reversed(keys):  # the start of a prompt is the last to be removed
            if key in blocks:
                del blocks[key]
            else:
                owners[key] = owners.get(key, 0) | bit
            blocks[key] = None
        added = len(blocks) - before
        if added:
            self.size += added
            if len(blocks) > server.capacity:
                self._evict(server, len(blocks) - server.capacity)
            if self.size > self._limit:
                self._shrink()

    def remove(self, name: str, keys: Iterable[int]) -> None:
        """Record that a server no longer has these blocks."""
        if (server := self._servers.get(name)) is not None:
            self._forget(server, [key for key in keys if key in server.blocks])

    def clear(self, name: str) -> None:
        """Record that a server has no blocks: its process is new, or its cache was reset."""
        if (server := self._servers.get(name)) is not None:
            self._forget(server, list(server.blocks))

    def matched(self, keys: Sequence[int]) -> dict[str, int]:
        """Return how many blocks from the start of a prompt each server has. A server without any is missing."""
        found: dict[str, int] = {}
        for depth, mask in self._levels(keys):
            found.update(dict.fromkeys(self._names.get(mask) or self._names_of(mask), depth))
        return found

    def depth(self, name: str, keys: Sequence[int]) -> int:
        """Return how many blocks from the start of a prompt one server has, by a few of them: it has the start for longest."""
        server = self._servers.get(name)
        return 0 if server is None else bisect_left(keys, True, key=lambda key: key not in server.blocks)

    def _names_of(self, mask: int) -> tuple[str, ...]:
        """Return the names of the servers of a mask, and store them: the same masks occur again and again."""
        if len(self._names) >= _MOST_NAMES:
            self._names.clear()
        names = self._names[mask] = tuple(name for bit, name in self._by_bit.items() if bit & mask)
        return names

    def _levels(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Return numbers of blocks, and the mask of the servers that have exactly so many from the start."""
        owners, levels, depth = self._owners.get, [], 0
        having = owners(keys[0], 0) if keys else 0
        for key in keys:
            mask = having & owners(key, 0)
            if mask != having:
                levels.append((depth, having ^ mask))
                having = mask
                if not mask:
                    break
            depth += 1
        if having:
            levels.append((depth, having))
        return levels

    def _shrink(self) -> None:
        """Evict until every server, and all together, are within their bounds. Blocks above the limit are evicted in equal shares."""
        for server in self._servers.values():
            if len(server.blocks) > server.capacity:
                self._evict(server, len(server.blocks) - server.capacity)
        if self.size > self._limit:
            share = self._limit // len(self._servers)
            for server in self._servers.values():
                if len(server.blocks) > share:
                    self._evict(server, min(len(server.blocks) - share, self.size - self._limit))

    def _evict(self, server: _ServerBlocks, count: int) -> None:
        self._forget(server, list(islice(server.blocks, max(count, 0))))

    def _forget(self, server: _ServerBlocks, keys: Sequence[int]) -> None:
        """Remove blocks that the server has."""
        owners, bit = self._owners, server.bit
        for key in keys:
            del server.blocks[key]
            if left := owners[key] ^ bit:
                owners[key] = left
            else:
                del owners[key]
        self.size -= len(keys)
