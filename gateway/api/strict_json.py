"""Strict JSON: the body of a request, parsed so that its text has one meaning. Pure.

The rule: what is refused here would be sent with another value, or take too long: integers beyond 64 bits, deep nesting, too many values.
``parse`` is a generator, because a large body is parsed in steps (see ``steps``).
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from itertools import accumulate
from typing import Any

import msgspec
import orjson

from gateway.api.errors import Refusal
from gateway.api.json_scan import DEPTH_CHANGES
from gateway.api.media_urls import CONTAINERS
from gateway.api.vllm.validation import dotted
from gateway.system.garbage_collector import collector_paused

Document = dict[str, Any]

MAX_DEPTH = 64
"""Levels of nesting that a body may have."""
_SHORT = 2048  # bytes up to which counting is as fast as searching; less than the minimum of `server.body_values`
_DIGITS = bytes(0x30 if chr(byte).isdigit() and byte < 0x80 else 0x20 for byte in range(256))
_MARKS = b",:[{"  # a body has about one value for each of these
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS + b'"')
_RARE = 1024  # marks of a kind that are searched for; more are counted, which is slower if there are few
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_PIECE = 256 * 1024  # bytes of marks that are counted in one step
_BRACKETS = 64 * 1024  # brackets and quotes that are checked in one step
_LONG_NUMBER = b"0" * 19  # 2**63 has so many digits
_HUGE = 2.0**63
_BYTES_PER_CHECK = 256  # checking one value takes as long as searching so many bytes


def parse(body: bytes | bytearray, most_values: int = sys.maxsize) -> Generator[None, None, Document]:
    """Parse strict UTF-8 JSON: an object, at most MAX_DEPTH deep, with at most about ``most_values`` values (see ``_check_values``).

    Raises Refusal invalid_json, and request_too_large for too many values.
    """
    if len(body) >= _SHORT:
        return (yield from _parse_long(body, most_values))
    document = _loaded(body)
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        yield from _check_depth(body)
    if body[::6].translate(_DIGITS).find(b"000") >= 0 and _has_long_numbers(body):
        yield from _check_integers(body)
    return document


def _parse_long(body: bytes | bytearray, most_values: int) -> Generator[None, None, Document]:
    """Do the same for a body in which searching is faster than counting."""
    if len(body) > most_values:
        yield from _check_values(body, most_values)
    with collector_paused():
        document = _loaded(body)
    yield
    if _may_be_deep(body):
        yield from _check_depth(body)
    if _may_have_huge_numbers(document, len(body) // _BYTES_PER_CHECK):
        yield
        if _has_long_numbers(body):
            yield
            yield from _check_integers(body)
    return document


def _loaded(body: bytes | bytearray) -> Document:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not body:
            raise Refusal("invalid_json", "The body is empty, which is not valid JSON.") from None
        raise Refusal("invalid_json", f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if type(document) is not dict:
        raise Refusal("invalid_json", "The body must be a JSON object.")
    return document


def _may_have_huge_numbers(document: Document, most_checks: int) -> bool:
    """Return whether a number is as large as the floats that orjson makes of integers beyond 64 bits.

    Return True as well if more than ``most_checks`` values would have to be checked: then searching the bytes is faster.
    """
    level: list[Any] = [document]
    while level:
        below: list[Any] = []
        for node in level:
            most_checks -= len(node)
            if most_checks < 0:
                return True
            for value in node.values() if type(node) is dict else node:
                kind = type(value)
                if kind in CONTAINERS:
                    below.append(value)
                elif kind is float and abs(value) >= _HUGE:
                    return True
        level = below
    return False


def _has_long_numbers(body: bytes | bytearray) -> bool:
    """Return whether the body has 19 digits in a row, perhaps in a string. They cover three of the bytes 0, 6, 12 and so on."""
    # ``find``, because ``in`` creates and drops an exception
    return body[::6].translate(_DIGITS).find(b"000") >= 0 and body.translate(_DIGITS).find(_LONG_NUMBER) >= 0


def _check_integers(body: bytes | bytearray) -> Generator[None, None, None]:
    """Check that no integer has more than 64 bits: orjson makes a float of it, so another number would be sent. Raises Refusal.

    msgspec parses these integers, and orjson refuses to serialize them. Both take a fraction of the time of a parser with callbacks.
    """
    name = ""
    try:
        with collector_paused():
            document = msgspec.json.decode(body)
        yield
        for name in document:
            orjson.dumps(document[name])
    except msgspec.DecodeError:
        raise Refusal("invalid_json", "The body has an integer of more than 64 bits.") from None
    except TypeError:
        field = dotted((name,))
        raise Refusal("invalid_value", f"The field '{field}' has an integer of more than 64 bits.", param=field) from None


def _may_be_deep(body: bytes | bytearray) -> bool:
    """Return whether the body has more than MAX_DEPTH brackets. Most bodies have few, and then searching is much faster than counting."""
    return _found(body, b"{", MAX_DEPTH + 1)[0] + _found(body, b"[", MAX_DEPTH + 1)[0] > MAX_DEPTH


def _found(body: bytes | bytearray, mark: bytes, most: int) -> tuple[int, int]:
    """Return how often a mark was found, at most ``most`` times, and where the search ended; -1 for the end of the body."""
    count, at = 0, body.find(mark)
    while at >= 0:
        count += 1
        if count == most:
            return count, at + 1
        at = body.find(mark, at + 1)
    return count, -1


def _check_values(body: bytes | bytearray, most: int) -> Generator[None, None, None]:
    """Check how many values a body has before it is parsed, by its commas, colons and opening brackets. Raises Refusal.

    The first count includes marks inside strings, since that is fast. If it is too high, only the marks outside strings are counted.
    """
    marks = 0
    for number in _MARKS:
        mark = bytes((number,))
        count, rest = _found(body, mark, _RARE)
        marks += count if rest < 0 else count + body.count(mark, rest)
        yield
    if marks > most and (yield from _marks_outside_strings(body)) > most:
        raise Refusal("request_too_large", f"The body has more than {most} JSON values.")


def _marks_outside_strings(body: bytes | bytearray) -> Generator[None, None, int]:
    """Count the marks outside strings. The count is exact for valid JSON."""
    marks, count, inside = (yield from _marks_and_quotes(body, _NO_MARKS)), 0, 0
    for start in range(0, len(marks), _PIECE):
        texts = marks[start : start + _PIECE].split(b'"')
        count += sum(map(len, texts[inside::2]))
        inside ^= len(texts) & 1 ^ 1
        yield
    return count


def _marks_and_quotes(body: bytes | bytearray, others: bytes) -> Generator[None, None, bytes | bytearray]:
    """Return the body without escapes and without the other characters: marks, inside and outside strings, and the quotes of strings."""
    body = body.replace(b"\\\\", b"")
    yield
    body = body.replace(b'\\"', b"")
    yield
    body = body.translate(None, others)
    yield
    return body


def _check_depth(body: bytes | bytearray) -> Generator[None, None, None]:
    """Check that valid JSON is at most MAX_DEPTH deep, by the brackets outside strings. Raises Refusal.

    Each character of the body takes the same time. Visiting the values of a document would take ten times as long if all are lists.
    """
    marks, depth, inside = (yield from _marks_and_quotes(body, _NO_BRACKETS)), 0, 0
    for start in range(0, len(marks), _BRACKETS):
        texts = marks[start : start + _BRACKETS].split(b'"')
        depths = list(accumulate(map(DEPTH_CHANGES.__getitem__, b"".join(texts[inside::2])), initial=depth))
        if max(depths) > MAX_DEPTH:
            raise Refusal("invalid_json", f"The body is nested more than {MAX_DEPTH} levels deep.")
        depth = depths[-1]
        inside ^= len(texts) & 1 ^ 1
        yield
