"""Decode the batches of KV cache events that vLLM publishes (vllm/distributed/kv_events.py).

A batch is a msgpack array; its events are msgpack maps with their ``type``. Only the fields that the gateway needs are decoded. The rule:
an event of an unknown type is skipped, because it cannot change what is cached in a way that the known types express; any other
deviation is an error.
"""

from __future__ import annotations

import msgspec

BlockHash = int | bytes
"""vLLM's own hash of a block: 64 bits, or all its bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Consecutive blocks that are now in the cache.

    ``parent_block_hash``: the block before them, None at the start of a prompt. ``token_ids``: the tokens of all blocks.
    ``extra_keys``: for each block, the adapter's name, media and the salt (vllm/v1/core/kv_cache_utils.py).
    ``group_idx``: the KV cache group, a set of layers with separate blocks; ``kv_cache_spec_kind`` is its kind of attention.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Blocks that have been evicted from the cache of a group."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The whole cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True):
    """The events of one step of the engine. ``time``: when they were published, by the engine's clock in seconds since the epoch."""

    time: float
    events: tuple[Event, ...]


class _RawBatch(msgspec.Struct, array_like=True):
    time: float
    events: list[msgspec.Raw]


class _Typed(msgspec.Struct):
    type: str


_decode_raw = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_type = msgspec.msgpack.Decoder(_Typed).decode
_event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_KNOWN = frozenset(each.__name__ for each in (BlockStored, BlockRemoved, AllBlocksCleared))


def decode_batch(payload: bytes) -> Batch:
    """Decode the payload of one message. Raises ValueError for anything else than a batch of events."""
    try:
        raw = _decode_raw(payload)
        events = tuple(_event.decode(each) for each in raw.events if _decode_type(each).type in _KNOWN)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no batch of KV cache events: {error}") from None
    return Batch(raw.time, events)
