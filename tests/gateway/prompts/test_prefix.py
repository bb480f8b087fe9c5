"""Which requests share a number because they begin alike."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts.prefix import USER_PREFIX, affinity_key
from tests.support.examples import examples
from tests.support.rows import each_row

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
RESPONSE = {"role": "assistant", "content": "Yes."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


TEXT = "x" * USER_PREFIX

ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (chat(SYSTEM, user("a")), chat(SYSTEM, user("a"), RESPONSE, user("b"))),
    (chat(user("a")), chat(user("a"), RESPONSE, user("b"), RESPONSE, user("c"))),
    (chat(user(TEXT + "one question")), chat(user(TEXT + "another question"))),
    (chat(user([{"type": "text", "text": TEXT}, {"type": "text", "text": "one"}])), chat(user(TEXT + "other"))),
    ({"system": "s", **chat(user("a"))}, {"system": "s", **chat(user("a"), RESPONSE, user("b"))}),
    ({"instructions": "i", "input": "a"}, {"instructions": "i", "input": "a", "temperature": 1}),
    ({"input": [user("a")]}, {"input": [user("a"), RESPONSE, user("b")]}),
    ({"prompt": TEXT}, {"prompt": TEXT + "more"}),
    ({"prompt": list(range(600))}, {"prompt": list(range(900))}),
    ({"prompt": ["a", "b"]}, {"prompt": "a"}),
    ({"prompt": [[1, 2], [3]]}, {"prompt": [1, 2]}),
    ({"model": "m", **chat(user("a"))}, {"model": "n", "stream": True, **chat(user("a"))}),
    (chat(SYSTEM), {"temperature": 1, **chat(SYSTEM)}),
    (chat(SYSTEM, 7, user("a")), chat(SYSTEM, 7, user("b"))),  # nothing is read behind an invalid message
]  # fmt: skip
APART: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (chat(SYSTEM, user("a")), chat(SYSTEM, user("b"))),
    (chat(SYSTEM, user("a")), chat(user("a"))),
    (chat({"role": "system", "content": TEXT + "one"}, user("a")), chat({"role": "system", "content": TEXT + "other"}, user("a"))),
    ({"system": "s", **chat(user("a"))}, {"system": "t", **chat(user("a"))}),
    ({"instructions": "i", "input": "a"}, {"instructions": "j", "input": "a"}),
    ({"cache_salt": "one", **chat(user("a"))}, {"cache_salt": "other", **chat(user("a"))}),
    (chat(user([{"type": "image_url", "image_url": {"url": "http://a/1"}}])), chat(user([{"type": "image_url", "image_url": {"url": "http://a/2"}}]))),
    ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
]  # fmt: skip


@each_row(("one", "other"), ALIKE)
def test_what_begins_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert affinity_key(one) == affinity_key(other) is not None


@pytest.mark.parametrize(("one", "other"), APART)
def test_what_begins_otherwise(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert None is not affinity_key(one) != affinity_key(other) is not None


@pytest.mark.parametrize("document", [{}, chat(), chat(user("")), {"prompt": ""}, {"input": []}, {"query": "q", "documents": ["d"]}])
def test_a_body_without_a_prefix_has_no_affinity_key(document: dict[str, Any]) -> None:
    assert affinity_key(document) is None
    assert affinity_key({"cache_salt": "one", **document}) is None


def test_a_session_says_it_all() -> None:
    assert affinity_key(chat(user("a")), b"s1") == affinity_key({"prompt": "b"}, b"s1") != affinity_key(chat(user("a")), b"s2")
    assert affinity_key(chat(user("a")), b"") == affinity_key(chat(user("a")))


def test_it_is_the_same_in_every_process() -> None:
    assert affinity_key(chat(SYSTEM, user("Who are you?"))) == crc32(b"You are a helpful assistant.28Who are you?") == 2566133171


NAMES = st.sampled_from(["role", "content", "text", "image_url", "url", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=examples(200))
@given(st.dictionaries(st.sampled_from(["messages", "system", "instructions", "input", "prompt", "cache_salt"]), JSON, max_size=4))
def test_whatever_a_body_holds_it_has_a_number_or_none(document: dict[str, Any]) -> None:
    """Invalid values are left for the server to reject."""
    assert affinity_key(document) == affinity_key(document)
    assert affinity_key(document) is None or 0 < (affinity_key(document) or 0) < 2**32
