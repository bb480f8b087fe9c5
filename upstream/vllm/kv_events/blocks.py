"""The cached blocks of one engine, from its events: vLLM's hashes on one side, the gateway's keys on the other.

The rules:

* A block counts as cached while every group that counts has it. Groups with full attention count: a cached prefix needs each of its
  blocks in all of them. Groups with a sliding window or a state (Mamba) need only some of their blocks, which leading
  blocks cannot express; they are ignored, so the known prefix of these models is an upper bound. So are media other than the GPU's memory.
* vLLM may store a block twice, for example the last block of a prompt that was cached as a whole. It publishes both, and the
  eviction of each, so copies are counted.
* A block with an unknown parent has no key, and is left out. So is every block beyond ``limit``: memory is bounded, whatever an engine
  publishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from upstream.vllm.kv_events.batch import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from upstream.vllm.kv_events.keys import ExtraKeys, block_keys, root_key, token_bytes

FULL_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Values of ``kv_cache_spec_kind`` whose cached prefixes need all blocks. An engine without this field has one group."""
_MEDIA = (None, "GPU")  # the CPU build calls its memory GPU, too
LIMIT = 1_000_000
"""Blocks that are known of one engine at most. An entry takes about 300 bytes."""


class Changes(NamedTuple):
    """The changes by a batch. ``cleared`` comes first, then ``removed``, then ``inserted``; keys are in the order of the prompt."""

    cleared: bool = False
    removed: tuple[int, ...] = ()
    inserted: tuple[int, ...] = ()


@dataclass(slots=True)
class _Block:
    """A known block: its key, and how many copies each group has."""

    key: int
    copies: dict[int, int]


class EngineBlocks:
    """The blocks that one engine (one data-parallel rank) has cached."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._blocks: dict[BlockHash, _Block] = {}
        self._groups: dict[int, bool] = {}  # whether a group counts
        self._counting: tuple[int, ...] = ()
        self._cached: dict[BlockHash, int] = {}
        self.block_size: int | None = None
        """Tokens of a block; None before the first one."""
        self.unmapped = 0
        """Blocks that were left out, because their parent is unknown or the limit is reached."""

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._blocks)

    @property
    def keys(self) -> Iterable[int]:
        """The keys of all cached blocks."""
        return self._cached.values()

    def clear(self) -> Changes:
        """Forget all blocks: the engine was replaced, or events were lost."""
        self._blocks.clear()
        self._cached.clear()
        return Changes(cleared=True)

    def apply(self, events: Iterable[Event]) -> Changes:
        """Apply the events of a batch, and return the difference.

        The difference is taken at the end of the batch, because the groups of one block follow each other in separate events.
        """
        cleared = False
        counting = self._counting
        touched: dict[BlockHash, None] = {}
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.clear()
                    touched.clear()
                    cleared = True
                case BlockStored(medium=medium) if medium in _MEDIA:
                    self._store(event, touched)
                case BlockRemoved(medium=medium) if medium in _MEDIA:
                    self._remove(event, touched)
        found = self._blocks if self._counting != counting else touched
        return self._difference(cleared, list(found))

    def _store(self, event: BlockStored, touched: dict[BlockHash, None]) -> None:
        group = event.group_idx or 0
        if not self._counts(group, event):
            return
        hashes = event.block_hashes
        if (keys := self._keys_of(event)) is None:
            self.unmapped += len(hashes)
            return
        for block_hash, key in zip(hashes, keys, strict=True):
            if (block := self._blocks.get(block_hash)) is None:
                if len(self._blocks) >= self._limit:
                    self.unmapped += 1
                    continue  # the next blocks may be known ones
                block = self._blocks[block_hash] = _Block(key, {})
            block.copies[group] = block.copies.get(group, 0) + 1
            touched[block_hash] = None

    def _counts(self, group: int, event: BlockStored) -> bool:
        """Return whether a group counts. The first one decides the size of blocks; a group with another size is ignored."""
        if (counts := self._groups.get(group)) is None:
            if self.block_size is None and event.kv_cache_spec_kind in FULL_KINDS and event.block_size > 0:
                self.block_size = event.block_size
            counts = self._groups[group] = event.kv_cache_spec_kind in FULL_KINDS and event.block_size == self.block_size
            self._counting = tuple(each for each, each_counts in self._groups.items() if each_counts)
        return counts

    def _keys_of(self, event: BlockStored) -> list[int] | None:
        """Return the key of each block; None if the parent is unknown, or the tokens are not those of the blocks."""
        size, hashes = event.block_size, event.block_hashes
        if size != self.block_size or len(event.token_ids) != len(hashes) * size:
            return None
        if event.parent_block_hash is None:
            parent = root_key(event.lora_name)
        elif (block := self._blocks.get(event.parent_block_hash)) is not None:
            parent = block.key
        else:
            return None
        try:
            tokens = token_bytes(event.token_ids)
        except OverflowError:
            return None  # placeholders of an input that has no tokens
        return block_keys(parent, tokens, size, [_without_adapter(each, event) for each in event.extra_keys or ()])

    def _remove(self, event: BlockRemoved, touched: dict[BlockHash, None]) -> None:
        group = event.group_idx or 0
        for block_hash in event.block_hashes:
            block = self._blocks.get(block_hash)
            if block is None or group not in block.copies:
                continue
            block.copies[group] -= 1
            if not block.copies[group]:
                del block.copies[group]
            touched[block_hash] = None

    def _difference(self, cleared: bool, hashes: Iterable[BlockHash]) -> Changes:
        """Return the difference between these blocks and what was reported before."""
        removed: list[int] = []
        inserted: list[int] = []
        for block_hash in hashes:
            block = self._blocks[block_hash]
            is_cached = all(group in block.copies for group in self._counting)
            if is_cached and block_hash not in self._cached:
                self._cached[block_hash] = block.key
                inserted.append(block.key)
            elif not is_cached and block_hash in self._cached:
                del self._cached[block_hash]
                removed.append(block.key)
            if not block.copies:
                del self._blocks[block_hash]
        return Changes(cleared, tuple(removed), tuple(inserted))


def _without_adapter(extra: list[object] | None, event: BlockStored) -> ExtraKeys:
    """Return a block's extra keys without the adapter's name, which is the first of them and part of the root key."""
    return extra[1:] if extra and event.lora_name is not None and extra[0] == event.lora_name else extra
