"""The scanner finds what a JSON parser finds, however the document is cut, and in time in proportion to its bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.json_scan import ELEMENT, Scanner, Wanted
from tests.support.examples import examples
from tests.support.rows import each_row

WANTED: Wanted = {
    "usage": None,
    "choices": {ELEMENT: {"finish_reason": None}},
    "response": {"usage": None, "status": None},
    "model": None,
}
TEXTS = [
    *('"usage":{"prompt_tokens":9}', '{"usage":{}}', '"finish_reason":"abort"', '"},"usage":{"a":1},"x":"', "usage"),
    *("\\", '\\"', '"', "]}", "[{", "\\\\", "\\" * 7 + '"', "é\n\x00", "a" * 300),
]
KEYS = ["usage", "choices", "response", "model", "finish_reason", "status", "a", ELEMENT, '"', "\\", '"usage":', "k" * 300]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from(TEXTS)


def values(depth: int) -> st.SearchStrategy[Any]:
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=5),
        max_leaves=depth,
    )


DOCUMENTS = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), values(30), max_size=8)
FORMS: list[dict[str, Any]] = [{"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (" , ", " : ")}]
CUTS = st.lists(st.integers(0, 100_000), max_size=10)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]


def wanted_values(document: Any, wanted: Wanted, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of a parsed document at the wanted paths, in its order."""
    if isinstance(document, list):
        items = [(ELEMENT, value) for value in document] if ELEMENT in wanted else []
    else:
        items = [] if ELEMENT in wanted or not isinstance(document, dict) else list(document.items())
    for key, value in items:
        if key in wanted:
            inner = wanted[key]
            if inner is None:
                yield (*path, key), value
            else:
                yield from wanted_values(value, inner, (*path, key))


def scanned(parts: list[bytes], wanted: Wanted = WANTED) -> list[tuple[tuple[str, ...], Any]]:
    scanner, found, value = Scanner(wanted), [], b""
    for part in parts:
        for path, start, end, is_last in scanner.feed(part):
            value += part[start:end]
            if is_last:
                found.append((path, json.loads(value)))
                value = b""
    assert not value, "a value without an end"
    return found


@settings(deadline=None, max_examples=examples(300))
@given(document=DOCUMENTS, form=st.sampled_from(FORMS), cuts=CUTS, before=st.sampled_from([b"", b" \r\n\t"]))
def test_it_finds_what_a_parser_finds(document: dict[str, Any], form: dict[str, Any], cuts: list[int], before: bytes) -> None:
    wire = before + json.dumps(document, **form).encode("utf-8", "replace")
    assert scanned(pieces(wire, cuts)) == list(wanted_values(json.loads(wire), WANTED))


@settings(deadline=None, max_examples=examples(100))
@given(unit=values(10), count=st.integers(50, 400), form=st.sampled_from(FORMS), cuts=CUTS)
def test_it_skips_long_values_as_a_parser_does(unit: Any, count: int, form: dict[str, Any], cuts: list[int]) -> None:
    """Long enough that whole blocks are skipped."""
    document = {"usage": 1, "a": [unit] * count, "choices": [{"message": {"a": [unit] * count}, "finish_reason": "x"}] * 2, "model": unit}
    wire = json.dumps(document, **form).encode("utf-8", "replace")
    assert scanned(pieces(wire, cuts)) == list(wanted_values(json.loads(wire), WANTED))


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_it_may_be_cut_anywhere(step: int) -> None:
    document = {text: {"usage": text, "a": [text, {text: -1.5}]} for text in TEXTS} | {"usage": {"a": [1, "}"]}, "choices": [{}, {}, 5]}
    wire = json.dumps(document, indent=1).encode()
    expected = list(wanted_values(document, WANTED))
    assert scanned([wire[at : at + step] for at in range(0, len(wire), step)]) == expected


@each_row("key", [b"us\\u0061ge", b"\\u0075\\u0073\\u0061\\u0067\\u0065", b"usag\\u0065"])
@each_row("cut", range(0, 30, 4))
def test_an_escaped_key_is_the_same_key(key: bytes, cut: int) -> None:
    wire = b'{"a":[],"%b" : 5}' % key
    assert scanned([wire[:cut], wire[cut:]]) == [(("usage",), 5)]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"   ",
        b'[{"usage":1}]',
        b'"usage"',
        b"5",
        b'Hello {"usage":1}',
        b'{"usage" 1}',
        b'{usage:1,"usage":2}',
        b"}",
        b'{"a":1}{"usage":1}',
        b'{"us\\qage":1}',
    ],
)
def test_what_is_no_document_has_nothing(text: bytes) -> None:
    for parts in ([text], [text[at : at + 1] for at in range(len(text))]):
        assert scanned(parts) == []


@settings(deadline=None)
@given(data=st.binary(max_size=300), cuts=CUTS)
def test_it_never_fails(data: bytes, cuts: list[int]) -> None:
    scanner = Scanner(WANTED)
    for part in pieces(b'{"usage":' + data, cuts):
        for _, start, end, _ in scanner.feed(part):
            assert 0 <= start <= end <= len(part)


UNITS = [
    *(b'"', b"\\", b'\\"', b"\\u00", b" ", b"1,", b"0.12345678901234567890,"),
    *(b"[", b"[]", b"{", b'{"', b'"a",', b'{"a":[1]},', b'"a":{"b":"'),
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("inside", [b'{"a":"', b'{"a":[', b"{", b'{"choices":['])
def test_scanning_takes_time_in_proportion(unit: bytes, inside: bytes) -> None:
    def seconds(count: int) -> float:
        data = inside + unit * count
        since = time.process_time()
        scanner = Scanner(WANTED)
        for at in range(0, len(data), 65536):
            scanner.feed(data[at : at + 65536])
        return time.process_time() - since

    seconds(1000)
    assert seconds(160_000) < 60 * max(seconds(16_000), 0.002)
