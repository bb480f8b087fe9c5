"""Strict JSON: what is parsed, and what is refused because it would be sent with another value or take too long."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api import strict_json
from gateway.api.errors import Refusal
from gateway.api.strict_json import MAX_DEPTH, _marks_outside_strings
from gateway.system.steps import SMALL, finished


def parse(body: bytes, most_values: int = sys.maxsize) -> dict[str, Any]:
    return finished(strict_json.parse(body, most_values))


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_the_depth_of_a_body(opening: bytes, closing: bytes) -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' + opening * (levels - 1) + b"1" + closing * (levels - 1) + b"}"

    assert parse(nested(MAX_DEPTH))
    assert parse(b'{"a":[%b]}' % b",".join([b"[]"] * 1000)), "wide is not deep"
    for levels in (MAX_DEPTH + 1, 2000, 100_000):
        with pytest.raises(Refusal) as caught:
            parse(nested(levels))
        assert caught.value.code == "invalid_json"


VALUES = st.recursive(
    st.text(alphabet='a[]{},:"\\\n', max_size=6) | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[:"\\'), inner),
)


@settings(deadline=None)
@given(value=VALUES, levels=st.integers(MAX_DEPTH - 8, MAX_DEPTH + 1), large=st.booleans())
def test_the_depth_is_counted_outside_strings(value: Any, levels: int, large: bool) -> None:
    inner = json.dumps(value, ensure_ascii=False).encode()
    padding = b"x" * 2048 if large else b""
    body = b'{"":%b%b%b,"[{":"%b]"}' % (b"[" * (levels - 1), inner, b"]" * (levels - 1), padding)
    if levels + _depth(value) <= MAX_DEPTH:
        assert parse(body)
    else:
        with pytest.raises(Refusal, match="nested more than 64 levels deep"):
            parse(body)


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


@pytest.mark.parametrize(
    "element",
    [b"[]", b"{}", b"[0]", b"[[]]", b"[" * 62 + b"]" * 62, b'{"":' * 62 + b"0" + b"}" * 62, b"[" * 62 + b"1e300" + b"]" * 62],
    ids=lambda element: element[:8].decode(),
)
def test_a_small_body_is_parsed_in_few_steps_whatever_it_contains(element: bytes) -> None:
    """The rest is work of C functions on bytes, in proportion to their number."""
    body = b'{"a":[%b]}' % b",".join([element] * (SMALL // (len(element) + 1) - 1))
    counted = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        parse(body)
    finally:
        sys.settrace(before)
    assert counted < 20_000, counted


@pytest.mark.parametrize("element", [b"[]", b"{}", b"[[]]", b'{"a":1}', b"[1,[]]", b"1", b'"a"', b'"["'])
def test_the_number_of_values(element: bytes) -> None:
    body = b'{"a":[%b]}' % b",".join([element] * 1100)
    marks = sum(element.count(mark) for mark in (b",", b":", b"[", b"{")) - element.count(b'"["')
    most = 1100 * (marks + 1) - 1 + 3
    assert parse(body, most)
    with pytest.raises(Refusal, match=f"more than {most - 1} JSON values") as caught:
        parse(body, most - 1)
    assert caught.value.code == "request_too_large"


def test_marks_inside_a_string_are_not_counted() -> None:
    text = b'"' + b'[{,:\\"' * 1000 + b'"'
    assert parse(b'{"a":[%b],"b":[[[%b]]]}' % (b",".join([b"1"] * 1000), text), 1010)


@settings(deadline=None)
@given(VALUES)
def test_marks_in_strings_are_not_counted(value: Any) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    assert finished(_marks_outside_strings(body)) == _marks(value)


def _marks(value: Any) -> int:
    """Commas, colons and opening brackets."""
    if not isinstance(value, dict | list):
        return 0
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(len(value) - 1, 0) + (len(value) if isinstance(value, dict) else 0) + sum(map(_marks, inside))


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes(body: bytes) -> None:
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:
        expected = None
    if isinstance(expected, dict):
        assert parse(body) == expected
    else:
        with pytest.raises(Refusal, match="JSON"):
            parse(body)
