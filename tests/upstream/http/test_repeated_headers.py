"""Remembered headers: they are as a parser without memory reads them, and which ones are parsed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.client.http.head import RequestHead, parse_head
from gateway.client.http.head import with_length as request_with_length
from tests.support.rows import each_row
from upstream.http.repeated_headers import RepeatedHeaders
from upstream.http.response_head import ResponseHead, ResponseHeadError, parse_response_head, with_length

T = TypeVar("T")

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
    """Draw headers of which some differ from others only in the digits, or in white space behind them."""
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        given = draw(lines)
        for _ in range(draw(st.integers(1, 3))):
            varied = [line if draw(st.booleans()) else b"content-length: " + draw(digits) + draw(spaces) for line in given]
            drawn.append(b"\r\n".join([draw(starts), b"host: a", *varied, b"", b""]))
    return [draw(st.sampled_from(drawn)) for _ in range(8)]


def _of_request(head: RequestHead) -> tuple[object, ...]:
    values = list(head.headers.items()), list(head.fields), head.content_length
    return head.method, head.url, *values, head.http10, head.chunked, head.keep_alive


def _of_response(head: ResponseHead) -> tuple[object, ...]:
    return head.status, list(head.headers.items()), head.length, head.chunked, head.keep_alive


def _read(parse: Callable[[bytes], T], values: Callable[[T], object], data: bytes) -> object:
    try:
        return values(parse(data))
    except (Refusal, ResponseHeadError) as error:
        return str(error)


@given(similar())
def test_remembered_headers_are_the_same_as_parsed_ones(messages: list[bytes]) -> None:
    requests, responses = RepeatedHeaders(parse_head, request_with_length), RepeatedHeaders(parse_response_head, with_length)
    for data in messages:
        assert _read(requests.parse, _of_request, data) == _read(parse_head, _of_request, data)
        assert _read(responses.parse, _of_response, data) == _read(parse_response_head, _of_response, data)


class Parser:
    """A parser that counts its calls, and returns the bytes."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self.headers = RepeatedHeaders[bytes](self._parse, lambda head, digits: b"%b with %b" % (head, digits))

    def _parse(self, data: bytes) -> bytes:
        self.parsed.append(data)
        return data

    def remembers(self, second: bytes) -> bool:
        """Return whether headers are not parsed after those before them."""
        number = len(self.parsed)
        self.headers.parse(second)
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
def test_which_headers_are_remembered(first: bytes, second: bytes, is_remembered: bool) -> None:
    parser = Parser()
    assert not parser.remembers(first)
    assert parser.remembers(second) == is_remembered


def test_another_length_is_that_of_the_new_bytes() -> None:
    parser = Parser()
    assert parser.headers.parse(FIRST) == FIRST
    assert parser.headers.parse(FIRST.replace(b"5", b"70")) == FIRST + b" with 70"
    assert parser.headers.parse(FIRST) == FIRST


def test_not_all_of_changing_headers_are_remembered() -> None:
    parser, second, third = Parser(), FIRST.replace(b"y", b"z"), FIRST.replace(b"y", b"w")
    assert [parser.remembers(data) for data in (FIRST, second, FIRST, second)] == [False, False, True, False]
    assert [parser.remembers(data) for data in (second, FIRST, third, FIRST)] == [True, False, False, False]


@pytest.mark.parametrize(
    "second", [FIRST.replace(b"y", b"y" * 4096), FIRST.replace(b"x: y", b"content-length: 5"), FIRST.replace(b"5", b"5 ")]
)
def test_headers_that_cannot_be_remembered_replace_the_remembered_ones(second: bytes) -> None:
    parser = Parser()
    assert [parser.remembers(data) for data in (FIRST, second, second, FIRST)] == [False] * 4
    assert parser.headers.parse(FIRST) == FIRST


def test_invalid_headers_are_not_remembered() -> None:
    repeated = RepeatedHeaders(parse_response_head, with_length)
    for _ in range(2):
        with pytest.raises(ResponseHeadError):
            repeated.parse(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n")
