"""A usage object is read in the shape of each API."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.usage import Usage, convert_usage, decode_usage, merged

# Shapes as vLLM 0.32 writes them
CHAT = b'"usage":{"prompt_tokens":15,"total_tokens":37,"completion_tokens":22,"prompt_tokens_details":{"cached_tokens":4}}'
RESPONSES = (
    b'"usage":{"input_tokens":15,"input_tokens_details":{"cached_tokens":3,"cache_write_tokens":0,"input_tokens_per_turn":[],'
    b'"cached_tokens_per_turn":[]},"output_tokens":22,"output_tokens_details":{"reasoning_tokens":11,"tool_output_tokens":0,'
    b'"output_tokens_per_turn":[1,2],"tool_output_tokens_per_turn":[]},"total_tokens":37}'
)
SHAPES = {
    CHAT: Usage(15, 22, 4, 0),
    CHAT.replace(b'{"cached_tokens":4}', b"null"): Usage(15, 22),
    RESPONSES: Usage(15, 22, 3, 11),
    b'"usage":{"input_tokens":15,"output_tokens":22}': Usage(15, 22),
    b'"usage":{"input_tokens":8,"cache_read_input_tokens":7,"output_tokens":22}': Usage(15, 22, 7),
    b'"usage":{"input_tokens":3,"cache_creation_input_tokens":5,"cache_read_input_tokens":7,"output_tokens":22}': Usage(15, 22, 7),
    b'"usage":{"input_tokens":15,"cache_creation_input_tokens":null,"cache_read_input_tokens":null,"output_tokens":22}': Usage(15, 22),
    b'"usage":{"prompt_tokens":7,"total_tokens":7}': Usage(7),
    b'"usage": {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}': Usage(7),
}


@pytest.mark.parametrize("field", SHAPES)
def test_every_shape(field: bytes) -> None:
    text = field.removeprefix(b'"usage":')
    assert decode_usage(text) == convert_usage(json.loads(text)) == SHAPES[field]


@pytest.mark.parametrize(
    "text", [b"", b"null", b"5", b'"x"', b"[]", b"{", b"{}", b'{"prompt_tokens":-1}', b'{"type":"duration","seconds":3}']
)
def test_what_is_no_usage(text: bytes) -> None:
    assert decode_usage(text) is None


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["prompt_tokens", "input_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"]),
                        inner, max_size=4), max_leaves=8))  # fmt: skip
def test_reading_never_fails(value: object) -> None:
    usage = convert_usage(value) if isinstance(value, dict) else None
    assert usage is None or min(usage.prompt, usage.completion, usage.cached, usage.reasoning) >= 0


@pytest.mark.parametrize("value", [{"prompt_tokens": -1}, {"prompt_tokens": True}, {"prompt_tokens": "5"}, {}, {"prompt_tokens": 1.5}])
def test_what_is_no_count(value: dict[str, object]) -> None:
    assert convert_usage(value) is None


def test_counts_of_one_stream_grow() -> None:
    assert merged(Usage(15, 0), Usage(0, 22, reasoning=3)) == Usage(15, 22, 0, 3)
    start, end = {"input_tokens": 15, "output_tokens": 0}, {"input_tokens": 8, "output_tokens": 22, "cache_read_input_tokens": 7}
    assert merged(convert_usage(start), convert_usage(end)) == Usage(15, 22, 7)
    assert merged(None, Usage(1)) == merged(Usage(1), None) == Usage(1)
    assert merged(None, None) is None
