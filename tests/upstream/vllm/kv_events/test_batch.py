"""Batches as vLLM 0.32 publishes them, and anything else."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.vllm.kv_events.batch import AllBlocksCleared, Batch, BlockRemoved, BlockStored, decode_batch

STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt", ["image", 3]]],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
    "session_id": "x",
}


def encoded(*events: object) -> bytes:
    return msgspec.msgpack.encode([12.5, events, 0])


def test_a_batch_with_all_types() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"\x01\x02"], "medium": "GPU", "group_idx": 1}
    stored = BlockStored([2**64 - 1], None, [1, 2], 2, "GPU", None, [["salt", ["image", 3]]], 0, "full_attention")
    expected = Batch(12.5, (stored, BlockRemoved([b"\x01\x02"], "GPU", 1), AllBlocksCleared()))
    assert decode_batch(encoded(STORED, removed, {"type": "AllBlocksCleared"})) == expected


def test_fields_with_defaults_may_be_missing() -> None:
    least = {name: STORED[name] for name in ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")}
    assert decode_batch(msgspec.msgpack.encode([1.0, [least]])).events == (BlockStored([2**64 - 1], None, [1, 2], 2),)


def test_an_unknown_type_is_skipped() -> None:
    assert decode_batch(encoded({"type": "BlockMoved", "to": "CPU"}, {"type": "AllBlocksCleared"})).events == (AllBlocksCleared(),)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encoded(["BlockStored", [1], None, [1], 1]), encoded(STORED | {"token_ids": "ab"}), encoded({"block_hashes": []})],
    ids=["empty", "no msgpack", "events as arrays", "a wrong type", "no type"],
)
def test_anything_else_is_an_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no batch of KV cache events"):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(payload: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(decode_batch(payload), Batch)
