"""The blocks that events describe, compared with the plain model of an engine that publishes them."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kv_engine import FULL, WINDOW, PlainEngine, Prefix
from upstream.vllm.kv_events.batch import BlockRemoved, BlockStored, decode_batch
from upstream.vllm.kv_events.blocks import Changes, EngineBlocks
from upstream.vllm.kv_events.keys import block_keys, prompt_keys, root_key, token_bytes

SIZE = 4
PROMPT = st.tuples(
    st.lists(st.integers(0, 1), max_size=16), st.sampled_from((None, None, "red", "blue")), st.sampled_from((None, None, "adapter", "red"))
)
KINDS = st.sampled_from(((FULL,), (None,), (FULL, FULL), (FULL, WINDOW), (WINDOW, "mla_attention")))


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **fields: Any) -> BlockStored:
    return BlockStored([*hashes], parent, tokens, SIZE, "GPU", **fields)


def key_of(prefix: Prefix) -> int:
    """Return the key of the block that ends a prefix, computed as for a request."""
    adapter, salt, *tokens = prefix
    assert adapter is None or isinstance(adapter, str)
    return block_keys(root_key(adapter), token_bytes(tokens), SIZE, [[salt]] if salt else [])[-1]  # type: ignore[arg-type]  # the rest are tokens


@given(st.lists(st.one_of(PROMPT, st.none()), max_size=30), st.integers(1, 12), KINDS)
def test_they_are_those_of_the_engine(prompts: list[Any], capacity: int, kinds: tuple[str | None, ...]) -> None:
    engine, blocks = PlainEngine(block_size=SIZE, capacity=capacity, kinds=kinds), EngineBlocks()
    reported: set[int] = set()
    for prompt in prompts:
        if prompt is None:
            batch, cached = engine.clear(), 0
        else:
            tokens, salt, adapter = prompt
            keys = prompt_keys(tokens, SIZE, adapter, salt)
            known = set(blocks.keys)
            predicted = next((index for index, key in enumerate(keys) if key not in known), len(keys)) * SIZE
            cached, published = engine.compute(tokens, salt, adapter)
            assert predicted == cached
            if published is None:
                continue
            batch = published
        changes = blocks.apply(decode_batch(batch[1]).events)
        if changes.cleared:
            reported.clear()
        assert reported.issuperset(changes.removed) and reported.isdisjoint(changes.inserted)
        reported = (reported - set(changes.removed)) | set(changes.inserted)
        assert reported == set(blocks.keys) == {key_of(prefix) for prefix in engine.cached}
    assert blocks.unmapped == 0


def test_a_block_counts_until_its_last_copy_is_evicted() -> None:
    blocks, event = EngineBlocks(), stored([1], [5] * SIZE)
    removed = msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}]])
    [key] = blocks.apply([event, event]).inserted
    assert blocks.apply(decode_batch(removed).events) == Changes()
    assert blocks.apply(decode_batch(removed).events).removed == (key,)
    assert len(blocks) == 0


def test_a_group_that_appears_later_takes_back_what_it_lacks() -> None:
    blocks = EngineBlocks()
    inserted = blocks.apply([stored([1, 2], [5] * 2 * SIZE, group_idx=0)]).inserted
    changes = blocks.apply([stored([1], [5] * SIZE, group_idx=1)])
    assert changes == Changes(removed=inserted[1:])


def test_other_media_and_unknown_parents_are_left_out() -> None:
    blocks = EngineBlocks()
    other = BlockStored([1], None, [5] * SIZE, SIZE, "CPU")
    assert blocks.apply([other, stored([3], [5] * SIZE, parent=2), stored([4], [5] * SIZE, parent=3)]) == Changes()
    assert (len(blocks), blocks.unmapped) == (0, 2)


def test_a_block_after_a_known_one_has_the_key_of_the_longer_prompt() -> None:
    blocks = EngineBlocks()
    tokens = list(range(3 * SIZE))
    first = blocks.apply([stored([1], tokens[:SIZE])]).inserted
    rest = blocks.apply([stored([2, 3], tokens[SIZE:], parent=1)]).inserted
    assert [*first, *rest] == prompt_keys([*tokens, 0], SIZE, None, None)


def test_removed_blocks_that_are_not_known_change_nothing() -> None:
    """The engine removes blocks that it stored before the first batch, and copies of groups that do not count."""
    blocks = EngineBlocks()
    [key] = blocks.apply([stored([1], [5] * SIZE)]).inserted
    assert blocks.apply([BlockRemoved([2], "GPU"), BlockRemoved([1], "GPU", group_idx=1)]) == Changes()
    assert set(blocks.keys) == {key}
    assert blocks.apply([BlockRemoved([2, 1], "GPU")]).removed == (key,)


def test_events_whose_tokens_do_not_fit_their_blocks_are_left_out() -> None:
    blocks = EngineBlocks()
    assert blocks.apply([stored([1, 2], [5] * SIZE), stored([3], [-1] * SIZE)]) == Changes()
    assert blocks.unmapped == 3


def test_media_distinguish_blocks() -> None:
    blocks, extra = EngineBlocks(), [[["cat.png", 1]], [["dog.png", 1]]]
    events = [stored([number], [5] * SIZE, extra_keys=[each]) for number, each in enumerate(extra)]
    assert len(set(blocks.apply(events).inserted)) == 2


def test_memory_is_bounded() -> None:
    blocks = EngineBlocks(limit=10)
    for number in range(100):
        blocks.apply([stored([number], [number] * SIZE)])
    assert (len(blocks), len(set(blocks.keys)), blocks.unmapped) == (10, 10, 90)
