"""Remembered heads: each is as a parser without memory reads it, and which ones are parsed again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.client.http import head as request_head
from tests.support.rows import each_row
from upstream.http import response_head
from upstream.http.repeated_head import RepeatedHead

POST, CONNECT, OK, EMPTY = b"POST /v1 HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"HTTP/1.1 200 OK", b"HTTP/1.1 204 No Content"
FIRST = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx: y\r\n\r\n"

digits = st.integers(0, 10**16).map(lambda number: b"%d" % number) | st.sampled_from(
    [b"", b"0", b"007", b"+1", b"1_0", b"\xb2", b"1" * 15, b"1" * 16]
)
lengths = st.tuples(
    st.sampled_from([b"content-length", b"Content-Length", b"CONTENT-LENGTH"]), st.sampled_from([b": ", b":", b":\t ", b" : "]), digits
)
others = st.sampled_from(
    [b"x: y", b"X: content-length: 3", b"connection: close", b"connection: upgrade\r\nupgrade: h2c", b"transfer-encoding: chunked", b"x:"]
)
lines = st.lists(lengths.map(b"".join) | others, max_size=4)
starts = st.sampled_from([POST, CONNECT, OK, EMPTY, b"HTTP/1.1 100 Continue", b"HTTP/1.0 200 OK", b"POST /v1 HTTP/1.0"])
spaces = st.sampled_from([b"", b" ", b"\t"])


@st.composite
def similar(draw: st.DrawFn) -> list[bytes]:
    """Draw heads of which some differ from others only in the digits, or in white space behind them."""
    heads = []
    for _ in range(draw(st.integers(1, 3))):
        given = draw(lines)
        for _ in range(draw(st.integers(1, 3))):
            varied = [line if draw(st.booleans()) else b"content-length: " + draw(digits) + draw(spaces) for line in given]
            heads.append(b"\r\n".join([draw(starts), b"host: a", *varied, b"", b""]))
    return [draw(st.sampled_from(heads)) for _ in range(8)]


def _read(parse: Callable[[bytes], msgspec.Struct], data: bytes) -> object:
    try:
        return msgspec.structs.astuple(parse(data))
    except (Refusal, response_head.ResponseHeadError) as error:
        return str(error)


@given(similar())
def test_a_remembered_head_is_the_same_as_a_parsed_one(heads: list[bytes]) -> None:
    for parse, with_length in (
        (request_head.parse_head, request_head.with_length),
        (response_head.parse_response_head, response_head.with_length),
    ):
        repeated = RepeatedHead[msgspec.Struct](parse, with_length)  # type: ignore[arg-type]  # each with its own heads
        for data in heads:
            assert _read(repeated.parse, data) == _read(parse, data)


class Parser:
    """A parser that counts its calls. Its heads are the bytes."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self.heads = RepeatedHead[bytes](self._parse, lambda head, digits: b"%b with %b" % (head, digits))

    def _parse(self, data: bytes) -> bytes:
        self.parsed.append(data)
        return data

    def remembers(self, second: bytes) -> bool:
        """Return whether a head is not parsed after those before it."""
        number = len(self.parsed)
        self.heads.parse(second)
        return len(self.parsed) == number


@each_row(
    ("first", "second", "is_remembered"),
    [
        (FIRST, FIRST, True),
        (FIRST, FIRST.replace(b"5", b"123456789012345"), True),
        (FIRST, FIRST.replace(b"5", b"1234567890123456"), False),
        (FIRST, FIRST.replace(b"5", b""), False),
        (FIRST.replace(b"x", b"date"), FIRST.replace(b"x", b"date").replace(b"5", b"6"), True),
        (FIRST, FIRST.replace(b"5", b"5 "), False),
        (FIRST, FIRST.replace(b"5", b"5\r\nz: 5"), False),
        (FIRST, FIRST.replace(b"200", b"201"), False),
        (FIRST, FIRST.replace(b"x: y", b"x: z"), False),
        (FIRST, FIRST.replace(b": 5", b":5"), False),
        (FIRST.replace(b"5", b"5 "), FIRST.replace(b"5", b"5 "), False),
        (FIRST.replace(b"5", b"five"), FIRST.replace(b"5", b"five"), False),
        (FIRST.replace(b"x: y", b"Content-Length: 6"), FIRST.replace(b"x: y", b"Content-Length: 6"), False),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n1", False),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: y\r\n", False),
        (b"a\r\nx: %b\r\n\r\n" % (b"y" * (4096 - 10)), b"a\r\nx: %b\r\n\r\n" % (b"y" * (4096 - 10)), True),
        (b"a\r\nx: %b\r\n\r\n" % (b"y" * (4097 - 10)), b"a\r\nx: %b\r\n\r\n" % (b"y" * (4097 - 10)), False),
    ],
)
def test_which_heads_are_remembered(first: bytes, second: bytes, is_remembered: bool) -> None:
    parser = Parser()
    assert not parser.remembers(first)
    assert parser.remembers(second) == is_remembered


def test_another_length_is_that_of_the_new_bytes() -> None:
    parser = Parser()
    assert parser.heads.parse(FIRST) == FIRST
    assert parser.heads.parse(FIRST.replace(b"5", b"70")) == FIRST + b" with 70"
    assert parser.heads.parse(FIRST) == FIRST


def test_not_each_head_of_a_sender_with_different_heads_is_remembered() -> None:
    parser, second, third = Parser(), FIRST.replace(b"y", b"z"), FIRST.replace(b"y", b"w")
    assert [parser.remembers(data) for data in (FIRST, second, FIRST, second)] == [False, False, True, False]
    assert [parser.remembers(data) for data in (second, FIRST, third, FIRST)] == [True, False, False, False]


@pytest.mark.parametrize(
    "second", [FIRST.replace(b"y", b"y" * 4096), FIRST.replace(b"x: y", b"content-length: 5"), FIRST.replace(b"5", b"5 ")]
)
def test_a_head_that_cannot_be_remembered_replaces_the_remembered_one(second: bytes) -> None:
    parser = Parser()
    assert [parser.remembers(data) for data in (FIRST, second, second, FIRST)] == [False] * 4
    assert parser.heads.parse(FIRST) == FIRST


def test_an_invalid_head_is_not_remembered() -> None:
    repeated = RepeatedHead(response_head.parse_response_head, response_head.with_length)
    for _ in range(2):
        with pytest.raises(response_head.ResponseHeadError):
            repeated.parse(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n")
