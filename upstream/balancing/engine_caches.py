"""The caches of the servers that publish KV cache events: exact, by keys over token IDs.

The prefix index guesses from the requests that a gateway has sent. These blocks are reported by the engines. The rules: a server is known
from its first reported block until its events are lost, and only then. A block size belongs to a server, and a prompt has keys for each
block size in use. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from upstream.balancing.prefix_index import LIMIT, PrefixIndex

_DISTRUST = 3
"""Prompts in a row with a wrong number of token IDs, after which no more IDs are requested: the server has another way to compute them."""


class EngineCaches:
    """The reported blocks of the servers of one model, by the servers' names."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._block_sizes: dict[str, int] = {}
        self._wrong = 0
        self.incomplete: set[str] = set()
        """The servers that may have more blocks cached: those that they stored before their events were first read."""
        self.block_sizes: frozenset[int] = frozenset()
        """The block sizes, in tokens, for which prompts need keys; empty while no server is known."""

    @property
    def size(self) -> int:
        """Blocks of all servers together."""
        return self._index.size

    def set_servers(self, names: Iterable[str]) -> None:
        """Accept the blocks of these servers, and forget others."""
        wanted = frozenset(names)
        for name in self._block_sizes.keys() - wanted:
            del self._block_sizes[name]
            self.incomplete.discard(name)
            self._index.remove_server(name)
        for name in wanted:
            self._index.add_server(name, LIMIT)
        self._update_block_sizes()

    def apply(self, name: str, block_size: int, complete: bool, *, cleared: bool, removed: bytes, inserted: bytes) -> None:
        """Apply the changes of a server's blocks: first ``cleared``, then ``removed``, then ``inserted``.

        Keys are 64-bit numbers in the machine's byte order. ``block_size`` is 0 if nothing is known of the server any longer.
        ``complete``: every cached block is known.
        """
        (self.incomplete.discard if complete else self.incomplete.add)(name)
        if cleared:
            self._index.clear(name)
        self._index.remove(name, array("Q", removed))
        self._index.insert(name, array("Q", inserted))
        if self._block_sizes.get(name, 0) != block_size:
            if block_size:
                self._block_sizes[name] = block_size
            else:
                del self._block_sizes[name]
            self._update_block_sizes()

    def cached_tokens(self, keys: Mapping[int, Sequence[int]]) -> dict[str, int]:
        """Return the cached tokens of a prompt on each known server. ``keys``: the prompt's keys for each block size."""
        matched = {size: self._index.matched(of_size) for size, of_size in keys.items()}
        return {name: matched[size].get(name, 0) * size for name, size in self._block_sizes.items() if size in matched}

    def cached_on(self, name: str, keys: Mapping[int, Sequence[int]]) -> int | None:
        """Return the cached tokens of a prompt on one server; None if they are unknown."""
        size = self._block_sizes.get(name, 0)
        return self._index.depth(name, keys[size]) * size if size in keys else None

    def verify(self, expected: int, reported: int) -> None:
        """Compare the number of a prompt's token IDs with the number of prompt tokens that the server reports for it."""
        self._wrong = 0 if expected == reported else self._wrong + 1
        if self._wrong == _DISTRUST:
            self._update_block_sizes()

    def _update_block_sizes(self) -> None:
        self.block_sizes = frozenset(self._block_sizes.values()) if self._wrong < _DISTRUST else frozenset()
