"""A plain model of an engine's prefix cache, which publishes events as vLLM does.

It evicts the least recently used block, numbers its batches from 0, and keeps the last ones. As in vLLM, a prompt whose blocks are all
cached stores a second copy of its last block, and each group of layers has separate events.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

FULL, WINDOW = "full_attention", "sliding_window"
Prefix = tuple[object, ...]
"""Adapter, salt and all tokens up to the end of a block: what identifies the block."""
_seeds = itertools.count()


class PlainEngine:
    """One engine. ``capacity``: its blocks. ``kinds``: the kind of each group. ``retained``: the batches that a replay can return."""

    def __init__(self, *, block_size: int = 4, capacity: int = 1000, kinds: Sequence[str | None] = (FULL,), retained: int = 10_000) -> None:
        self.block_size, self._capacity, self._kinds = block_size, capacity, kinds
        self._seed = next(_seeds)
        self._copies: OrderedDict[int, Prefix] = OrderedDict()  # by the number of the block, the least recently used one first
        self._numbers = itertools.count()
        self._batches = itertools.count()
        self._time = 1000.0 + 1000.0 * self._seed
        self.retained: deque[tuple[int, bytes]] = deque(maxlen=retained)

    @property
    def cached(self) -> set[Prefix]:
        """The cached blocks."""
        return set(self._copies.values())

    def compute(self, tokens: Sequence[int], salt: str | None = None, adapter: str | None = None) -> tuple[int, tuple[int, bytes] | None]:
        """Compute a prompt. Returns how many of its tokens were cached, and the published batch, if any."""
        size = self.block_size
        blocks: list[Prefix] = [(adapter, salt, *tokens[: end + size]) for end in range(0, len(tokens) - size + 1, size)]
        usable = blocks[: max(len(tokens) - 1, 0) // size]
        held: list[int] = []
        for prefix in usable:
            number = next((number for number, each in self._copies.items() if each == prefix), None)
            if number is None:
                break
            held.append(number)
        for number in held:
            self._copies.move_to_end(number)
        hits, events, new = len(held), [], blocks[len(held) :]
        for prefix in new:
            if len(self._copies) >= self._capacity:
                oldest = next((number for number in self._copies if number not in held), None)
                if oldest is None:
                    new = new[: len(held) - hits]
                    break
                events += self._removed(self._copies.pop(oldest))
            held.append(number := next(self._numbers))
            self._copies[number] = prefix
        if new:
            events += self._stored(blocks[:hits], new, tokens[hits * size : (hits + len(new)) * size], salt, adapter)
        return hits * size, self.publish(events) if events else None

    def clear(self) -> tuple[int, bytes]:
        """Reset the cache."""
        self._copies.clear()
        return self.publish([{"type": "AllBlocksCleared"}])

    def publish(self, events: list[dict[str, Any]]) -> tuple[int, bytes]:
        """Number and keep a batch."""
        self._time += 0.001
        batch = (next(self._batches), msgspec.msgpack.encode([self._time, events, 0]))
        self.retained.append(batch)
        return batch

    def _hash(self, prefix: Prefix) -> int:
        return int.from_bytes(blake2b(repr((self._seed, prefix)).encode(), digest_size=8).digest())

    def _removed(self, prefix: Prefix) -> list[dict[str, Any]]:
        removed = {"type": "BlockRemoved", "block_hashes": [self._hash(prefix)], "medium": "GPU"}
        return [removed | {"group_idx": group} for group in range(len(self._kinds))]

    def _stored(
        self, before: list[Prefix], new: list[Prefix], tokens: Sequence[int], salt: str | None, adapter: str | None
    ) -> list[dict[str, Any]]:
        extra = [[each for each in (adapter, salt if not before and not index else None) if each] or None for index in range(len(new))]
        stored = {
            "type": "BlockStored",
            "block_hashes": [self._hash(prefix) for prefix in new],
            "parent_block_hash": self._hash(before[-1]) if before else None,
            "token_ids": list(tokens),
            "block_size": self.block_size,
            "lora_id": None if adapter is None else 1,
            "medium": "GPU",
            "lora_name": adapter,
            "extra_keys": extra if any(extra) else [None] * len(new),
        }
        return [stored | {"group_idx": group, "kv_cache_spec_kind": kind} for group, kind in enumerate(self._kinds)]
