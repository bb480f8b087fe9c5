"""Keys are the same in all processes, and differ with everything that makes vLLM's blocks differ."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.vllm.kv_events.keys import block_keys, prompt_keys, root_key, token_bytes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SCRIPT = "from upstream.vllm.kv_events.keys import prompt_keys; print(prompt_keys(range(40), 16, 'adapter', 'salt'))"


def test_another_process_computes_the_same_keys() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(prompt_keys(range(40), 16, "adapter", "salt"))


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_prompt_that_ends_with_a_full_block_computes_it_again(length: int, blocks: int) -> None:
    assert len(prompt_keys(range(length), 4)) == blocks


def test_adapter_and_salt_change_every_key() -> None:
    found = [prompt_keys(range(9), 4, adapter, salt) for adapter, salt in ((None, None), ("a", None), (None, "a"), ("a", "a"), ("b", None))]
    assert len({key for keys in found for key in keys}) == 2 * len(found)


def test_an_id_that_has_more_than_32_bits_has_no_bytes() -> None:
    for invalid in (-1, 2**32):
        with pytest.raises(OverflowError):
            token_bytes([invalid])


@given(TOKENS, st.integers(1, 8), st.integers(0, 5))
def test_the_keys_of_a_prompt_are_those_of_its_parts(tokens: list[int], size: int, split: int) -> None:
    whole = block_keys(root_key("a"), token_bytes(tokens), size, [["salt"]])
    first = block_keys(root_key("a"), token_bytes(tokens[: split * size]), size, [["salt"]])
    if first:
        assert whole == first + block_keys(first[-1], token_bytes(tokens[split * size :]), size)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_keys_agree_as_far_as_the_tokens(one: list[int], other: list[int], size: int) -> None:
    same = 0
    while same < min(len(one), len(other)) // size and one[: (same + 1) * size] == other[: (same + 1) * size]:
        same += 1
    ours, theirs = block_keys(0, token_bytes(one), size), block_keys(0, token_bytes(other), size)
    equal = [left == right for left, right in zip(ours, theirs, strict=False)]
    assert equal == [index < same for index in range(len(equal))]
