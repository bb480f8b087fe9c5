"""The blocks of a prompt: equal starts have equal keys, in every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompts.blocks import MOST_BLOCKS, prompt_of
from gateway.system.steps import finished
from upstream.balancing.cost_model import BLOCK_BYTES

TEXT = "The quick brown fox jumps over the lazy dog. " * 200


def keys_of(document: Mapping[str, Any], adapter: str | None = None, session: bytes | None = None) -> Sequence[int]:
    return finished(prompt_of(document, adapter, session)).keys


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((depth for depth, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


MESSAGES = st.lists(st.builds(user, st.text(max_size=2000) | st.just(TEXT)), min_size=1, max_size=4)


@given(MESSAGES, MESSAGES)
def test_a_longer_conversation_has_the_keys_of_the_shorter_one(first: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    before, after = keys_of({"messages": first}), keys_of({"messages": first + more})
    assert common(before, after) >= len(before) - 1  # the last block may have the end of the list


@given(st.integers(0, len(TEXT) - 1))
def test_a_difference_changes_the_keys_from_its_block_on(position: int) -> None:
    changed = TEXT[:position] + "#" + TEXT[position + 1 :]
    one, other = keys_of({"prompt": TEXT}), keys_of({"prompt": changed})
    assert common(one, other) == min((position + 1) // BLOCK_BYTES, len(one))
    assert not set(one[common(one, other) :]) & set(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [user(TEXT)], "cache_salt": "a"}, {"messages": [user(TEXT)], "cache_salt": "b"}),
        ({"messages": [user(TEXT)], "cache_salt": "a"}, {"messages": [user(TEXT)]}),
        ({"messages": [user(TEXT)], "tools": [{"name": "a"}]}, {"messages": [user(TEXT)], "tools": [{"name": "b"}]}),
        ({"messages": [user(TEXT)], "system": "a"}, {"messages": [user(TEXT)], "system": "b"}),
        ({"input": TEXT, "instructions": "a"}, {"input": TEXT, "instructions": "b"}),
        ({"prompt": [1, 2, *range(1000)]}, {"prompt": [2, 2, *range(1000)]}),
        ({"prompt": [[1, *range(1000)], [5]]}, {"prompt": [[2, *range(1000)], [5]]}),
    ],
)
def test_what_separates_caches_separates_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert keys_of(one) and keys_of(other)
    assert not set(keys_of(one)) & set(keys_of(other))


def test_an_adapter_has_separate_keys_and_a_key() -> None:
    body = {"messages": [user(TEXT)]}
    plain, one, other = (finished(prompt_of(body, adapter)) for adapter in (None, "a", "b"))
    assert plain.adapter is None and one.adapter != other.adapter
    assert not set(plain.keys) & set(one.keys) and not set(one.keys) & set(other.keys)


def test_media_count_by_their_digest() -> None:
    def body(data: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return {"messages": [user([image, {"type": "text", "text": TEXT}])]}

    large, same, other = (finished(prompt_of(body(letter * 1_000_000))) for letter in "AAB")
    assert large.keys == same.keys and not set(large.keys) & set(other.keys)
    assert large.size < len(TEXT) + 200


def test_the_text_of_other_messages_counts_beside_media() -> None:
    def body(text: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        return {"messages": [{"role": "system", "content": text}, user([image])]}

    one, same, other = (keys_of(body(text)) for text in (TEXT, TEXT, "#" + TEXT))
    assert len(one) >= len(TEXT) // BLOCK_BYTES
    assert one == same and not set(one) & set(other)


def test_keys_are_bounded_and_the_size_is_not() -> None:
    prompt = finished(prompt_of({"prompt": "x" * (MOST_BLOCKS + 10) * BLOCK_BYTES}))
    assert len(prompt.keys) == MOST_BLOCKS and prompt.size > MOST_BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize(
    "prompt", [None, 7, [], [None], [{"role": "user"}], [{"content": [7, None, {}]}], {"a": 1}, 2**70, [2**70], "\ud800"]
)
def test_any_value_has_keys(prompt: Any) -> None:
    for name in ("messages", "input", "prompt", "system", "tools"):
        assert list(keys_of({name: prompt})) == []


def test_keys_are_equal_in_every_process() -> None:
    program = (
        "from gateway.prompts.blocks import prompt_of; from gateway.system.steps import finished; "
        "print(list(finished(prompt_of({'prompt': 'abc ' * 1000, 'cache_salt': 's'}, 'lora')).keys))"
    )
    outputs = {subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout for _ in range(2)}
    assert outputs == {f"{list(keys_of({'prompt': 'abc ' * 1000, 'cache_salt': 's'}, 'lora'))}\n"}
