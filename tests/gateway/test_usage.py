"""A server's own count is found, wherever the reads cut it, and nothing else is taken for it."""

from __future__ import annotations

import json
import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.usage import Observer, Usage, find, merged, read
from tests.support.wire import COMPLETION

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
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]


@pytest.mark.parametrize("member", SHAPES)
def test_every_shape(member: bytes) -> None:
    assert find(b'{"id":"x",' + member + b',"service_tier":null}') == SHAPES[member]


@settings(deadline=None)
@given(member=st.sampled_from(list(SHAPES)), places=CUTS, text=st.text(max_size=50), before=st.integers(0, 5000))
def test_it_is_found_however_it_is_cut(member: bytes, places: list[int], text: str, before: int) -> None:
    tricky = text + ' "usage":{"prompt_tokens":99,"completion_tokens":99} ' + "x" * before
    body = b'{"content":' + orjson.dumps(tricky) + b"," + member + b',"user":' + orjson.dumps(tricky) + b"}"
    observer = Observer()
    for piece in pieces(body, places):
        observer.feed(piece)
    assert observer.usage == find(body) == SHAPES[member]


@settings(deadline=None)
@given(places=CUTS, echo=st.dictionaries(st.text(max_size=5), st.integers(0, 99), max_size=3))
def test_the_last_one_counts(places: list[int], echo: dict[str, int]) -> None:
    echoed = orjson.dumps({"metadata": {"usage": {"prompt_tokens": 99, **echo}}, "tools": [{"usage": {"input_tokens": 98}}]})
    body = echoed[:-1] + b"," + RESPONSES + b"}"
    observer = Observer()
    for piece in pieces(body, places):
        observer.feed(piece)
    assert observer.usage == Usage(15, 22, 3, 11)


@settings(deadline=None)
@given(st.text(), CUTS)
def test_a_text_never_counts(text: str, places: list[int]) -> None:
    observer = Observer()
    for piece in pieces(json.dumps({"content": text + '"usage":{"prompt_tokens":5}', "usage": None}).encode(), places):
        observer.feed(piece)
    assert observer.usage is None


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["prompt_tokens", "input_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"]),
                        inner, max_size=4), max_leaves=8))  # fmt: skip
def test_reading_never_fails(value: object) -> None:
    usage = read(value) if isinstance(value, dict) else None
    assert usage is None or min(usage.prompt, usage.completion, usage.cached, usage.reasoning) >= 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_finding_never_fails(data: bytes) -> None:
    find(data + b'"usage":' + data)


@pytest.mark.parametrize("unit", [b'"usage":{', b'"usage":{}', b'"usage":   ', b'"usage":{"a":{', b"{}"])
def test_finding_takes_time_in_proportion(unit: bytes) -> None:
    def seconds(count: int) -> float:
        data = b'"usage":{' + unit * count
        since = time.process_time()
        find(data)
        return time.process_time() - since

    seconds(1000)
    assert seconds(80_000) < 60 * max(seconds(8_000), 0.001)


@pytest.mark.parametrize("value", [{"prompt_tokens": -1}, {"prompt_tokens": True}, {"prompt_tokens": "5"}, {}, {"prompt_tokens": 1.5}])
def test_what_is_no_count(value: dict[str, object]) -> None:
    assert read(value) is None


def test_counts_of_one_stream_grow() -> None:
    assert merged(Usage(15, 0), Usage(0, 22, reasoning=3)) == Usage(15, 22, 0, 3)
    start, end = {"input_tokens": 15, "output_tokens": 0}, {"input_tokens": 8, "output_tokens": 22, "cache_read_input_tokens": 7}
    assert merged(read(start), read(end)) == Usage(15, 22, 7)
    assert merged(None, Usage(1)) == merged(Usage(1), None) == Usage(1)
    assert merged(None, None) is None


def test_the_recorded_answer() -> None:
    assert find(COMPLETION) == Usage(3, 2, 1)
