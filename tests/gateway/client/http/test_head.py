"""The request line and headers of one request: what is accepted, what is derived from them, and what is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.client.http.head import MAX_HEAD, MAX_HEADERS, RequestHead, check_start, is_host, parse_head, with_length
from tests.support.garbage import without_cycles
from tests.support.rows import each_row

GET, POST, HOST = b"GET / HTTP/1.1\r\n", b"POST /v1/x HTTP/1.1\r\n", b"host: a\r\n"


def head(*lines: bytes, line: bytes = POST, host: bytes = HOST) -> RequestHead:
    return parse_head(line + host + b"".join(each + b"\r\n" for each in lines) + b"\r\n")


def code(data: bytes) -> str | None:
    """Return the code of the refusal; None for a valid request."""
    try:
        parse_head(data)
    except Refusal as refusal:
        return refusal.code
    return None


def message(data: bytes) -> str:
    with pytest.raises(Refusal) as raised:
        parse_head(data)
    return raised.value.message


# Attributes of a valid request


def test_the_request_line_and_headers() -> None:
    found = head(b"Accept:  a b \t", b"X-Empty:", b"content-length: 2")
    assert (found.method, found.url, found.http10, found.chunked, found.keep_alive) == (b"POST", b"/v1/x", False, False, True)
    expected = [(b"host", b"a"), (b"accept", b"a b"), (b"x-empty", b""), (b"content-length", b"2")]
    assert list(found.fields) == expected and found.headers == dict(expected)
    assert found.content_length == 2


@each_row(
    ("line", "lines", "http10", "length", "chunked", "keep_alive"),
    [
        (POST, (), False, None, False, True),
        (POST, (b"content-length: 7",), False, 7, False, True),
        (POST, (b"transfer-encoding: Chunked",), False, None, True, True),
        (POST, (b"connection: close",), False, None, False, False),
        (b"GET / HTTP/1.0\r\n", (), True, None, False, False),
        (b"GET / HTTP/1.0\r\n", (b"connection: keep-alive",), True, None, False, True),
        # CONNECT has no body (RFC 9112, section 6.3), and what follows is of another protocol.
        (b"CONNECT a:1 HTTP/1.1\r\n", (b"content-length: 7",), False, None, False, False),
        (b"CONNECT a:1 HTTP/1.1\r\n", (b"transfer-encoding: chunked",), False, None, False, False),
        # An offer of another protocol is not accepted. Without a body, what follows may be of that protocol.
        (GET, (b"connection: upgrade", b"upgrade: h2c"), False, None, False, False),
        (POST, (b"connection: upgrade", b"upgrade: h2c", b"content-length: 0"), False, 0, False, True),
        (POST, (b"connection: upgrade", b"upgrade: h2c", b"transfer-encoding: chunked"), False, None, True, True),
    ],
)
def test_the_framing(line: bytes, lines: tuple[bytes, ...], http10: bool, length: int | None, chunked: bool, keep_alive: bool) -> None:
    found = head(*lines, line=line)
    assert (found.http10, found.content_length, found.chunked, found.keep_alive) == (http10, length, chunked, keep_alive)
    assert {type(found.http10), type(found.chunked), type(found.keep_alive)} == {bool}


@each_row(
    ("line", "lines", "expects"),
    [
        (POST, (), False),
        (POST, (b"expect: 100-continue",), True),
        (POST, (b"Expect: 100-Continue",), True),
        (POST, (b"expect: 200-ok",), False),
        (b"POST / HTTP/1.0\r\n", (b"expect: 100-continue",), False),
    ],
)
def test_the_expectation_of_an_interim_response(line: bytes, lines: tuple[bytes, ...], expects: bool) -> None:
    assert head(*lines, line=line).expects_continue is expects


@pytest.mark.parametrize("offer", [(), (b"connection: upgrade", b"upgrade: h2c", b"content-length: 0")])
def test_repeated_headers(offer: tuple[bytes, ...]) -> None:
    """All lines are in ``fields``. By name, the last value applies, or all values of X-Forwarded-For."""
    found = head(b"X: 1\t", b"X-Forwarded-For: 1.1.1.1 ", b"x: 2 ", b"x-forwarded-for: 2.2.2.2", *offer)
    fields = [(b"host", b"a"), (b"x", b"1"), (b"x-forwarded-for", b"1.1.1.1"), (b"x", b"2"), (b"x-forwarded-for", b"2.2.2.2")]
    assert list(found.fields)[:5] == fields
    assert (found.headers[b"x"], found.headers[b"x-forwarded-for"]) == (b"2", b"1.1.1.1,2.2.2.2")
    assert len(found.headers) == 3 + len(offer) and len(found.fields) == 5 + len(offer)


def test_another_spelling_of_a_name_repeats_it() -> None:
    found = head(b"x: 1", b"X: 2")
    assert list(found.fields) == [(b"host", b"a"), (b"x", b"1"), (b"x", b"2")] and found.headers[b"x"] == b"2"


def test_white_space_behind_a_repeated_value() -> None:
    assert list(head(b"x: ax \t ", b"x: 2\t").fields) == [(b"host", b"a"), (b"x", b"ax"), (b"x", b"2")]


@pytest.mark.parametrize("end", [b" ", b"\t", b" \t", b"\t "])
def test_white_space_behind_a_value(end: bytes) -> None:
    assert head(b"x: 1" + end).headers[b"x"] == b"1"


def test_a_head_is_a_constant_without_cycles() -> None:
    """It is remembered for later requests. A cycle would wait for the garbage collector, for each request."""
    with pytest.raises(AttributeError):
        head().method = b"GET"  # type: ignore[misc]
    with without_cycles():
        head(b"connection: upgrade", b"upgrade: h2c")


def test_another_length() -> None:
    found = head(b"x: y", b"content-length: 2", b"z: 2", b"connection: close")
    other = with_length(found, b"31")
    assert (other.content_length, other.headers[b"content-length"]) == (31, b"31")
    assert list(other.fields) == [(name, b"31" if name == b"content-length" else value) for name, value in found.fields]
    assert {**other.headers, b"content-length": b"2"} == found.headers
    for name in ("method", "url", "http10", "chunked", "keep_alive"):
        assert getattr(other, name) == getattr(found, name)


# Rejected requests

INVALID = "invalid_request"


@each_row(
    ("data", "expected"),
    [
        (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", INVALID),
        (b"GET /  HTTP/1.1\r\n" + HOST + b"\r\n", INVALID),
        (b"GET\t/ HTTP/1.1\r\n" + HOST + b"\r\n", INVALID),
        (b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", INVALID),
        (b"GET / HTTP/1.1\n" + HOST + b"\r\n", INVALID),
        (b"GET / HTTP/1.1\r\nhost: a\nx: y\r\n\r\n", INVALID),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\n\r\n", INVALID),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", INVALID),
        (b"GET / HTTP/0.9\r\n" + HOST + b"\r\n", INVALID),
        (b"GET / RTSP/1.0\r\n" + HOST + b"\r\n", INVALID),
        (b"SOURCE / ICE/1.1\r\n" + HOST + b"\r\n", INVALID),
        (b"GET /\r\n" + HOST + b"\r\n", INVALID),
        (GET + HOST + b"x : y\r\n\r\n", INVALID),
        (GET + HOST + b" folded\r\n\r\n", INVALID),
        (GET + HOST + b"x: a\0\r\n\r\n", INVALID),
        (GET + HOST + b"x: a\r\n folded\r\n\r\n", INVALID),
        (POST + HOST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n", INVALID),
        (POST + HOST + b"content-length: +2\r\n\r\n", INVALID),
        (POST + HOST + b"content-length: 2, 2\r\n\r\n", INVALID),
        (POST + HOST + b"transfer-encoding: gzip\r\n\r\n", INVALID),
        (POST + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n", INVALID),
        (b"POST / HTTP/1.0\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n", INVALID),
        (POST + HOST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n", INVALID),
        (GET + HOST + b"\r\n\n", INVALID),  # llhttp accepts a bare line feed here
        (GET + b"\r\n", INVALID),
        (GET + b"host:\r\n\r\n", INVALID),
        (GET + b"host: a b\r\n\r\n", INVALID),
        (b"GET / HTTP/1.0\r\nhost: a b\r\n\r\n", INVALID),
        (b"GET / HTTP/1.0\r\n\r\n", None),
        (GET + HOST + b"\r\n", None),
    ],
)
def test_an_invalid_head(data: bytes, expected: str | None) -> None:
    assert code(data) == expected


ONCE = ("authorization", "x-api-key", "content-type", "content-length", "content-encoding", "host", "transfer-encoding")


@each_row("name", ONCE)
def test_a_header_that_may_come_once(name: str) -> None:
    value = {"host": b"a", "content-length": b"2", "transfer-encoding": b"chunked"}.get(name, b"x")
    host = b"" if name == "host" else HOST
    once, again = name.encode() + b": " + value + b"\r\n", name.title().encode() + b": " + value + b"\r\n"
    assert code(POST + host + once + b"\r\n") is None
    assert code(POST + host + once + again + b"\r\n") == INVALID
    if name not in ("content-length", "transfer-encoding"):  # llhttp rejects these itself
        assert message(POST + host + once + b"x: y\r\n" + again + b"\r\n") == f"The header '{name}' was sent more than once."


def test_the_message_for_each_reason() -> None:
    encoding = "The only supported transfer encoding is 'chunked', in HTTP/1.1."
    assert message(POST + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n") == encoding
    assert message(b"POST / HTTP/1.0\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n") == encoding
    assert message(GET + b"\r\n") == message(GET + b"host: a b\r\n\r\n") == "The header 'host' is missing or no valid host."
    assert message(b"BREW / HTTP/1.1\r\n\r\n") == "The request is not valid HTTP/1.1."
    assert message(GET + HOST + b"x: y\r\n" * MAX_HEADERS + b"\r\n") == (
        "The head of the request is larger than 65536 bytes or has more than 100 headers."
    )


def test_as_many_bytes_and_headers_as_are_permitted() -> None:
    assert (MAX_HEAD, MAX_HEADERS) == (65536, 100)
    filled = GET + HOST + b"x: " + b"a" * (MAX_HEAD - len(GET + HOST) - 7) + b"\r\n\r\n"
    assert len(filled) == MAX_HEAD and code(filled) is None
    assert code(filled.replace(b"x: ", b"xy: ")) == "headers_too_large"
    assert code(GET + HOST + b"x: y\r\n" * 99 + b"\r\n") is None
    assert code(GET + HOST + b"x: y\r\n" * 100 + b"\r\n") == "headers_too_large"


def test_a_large_head_that_is_invalid_is_reported_as_invalid() -> None:
    assert code(b"SOURCE / ICE/1.1\r\n" + b"a" * MAX_HEAD) == INVALID
    assert code(b"a\t" + b"a" * MAX_HEAD) == INVALID
    assert code(b"GET /" + b"a" * MAX_HEAD + b"\t HTTP/1.1\r\n" + HOST + b"\r\n") == "headers_too_large"


# The first bytes of a request


@each_row(
    ("start", "is_valid"),
    [
        (b"", True),
        (b"G", True),
        (b"GET / HT", True),
        (b"GET / HTTP/1.1", True),
        (b"GET / HTTP/1.1\r", True),
        (b"GET / HTTP/1.1\r\n", True),
        (b"GET / HTTP/1.0\r\nhost", True),
        (b"GET / HTTP/1.1\r\n\xff\0", True),
        (b"GET / HTTP/1.2\r\n", False),
        (b"GET / HTTP/1.1\n", False),
        (b"GET  / HTTP/1.1\r\n", False),
        (b"GET / \r\n", False),
        (b"\x16\x03\x01", False),
        (b"G\r/", False),
        (b"G\rx", False),
        (b"GET /\xff", False),
        (b"GET /\x1f", False),
        (b"GET /\x7f", False),
        (b"~ !", True),
        (b"\n", False),
        (b"\r\n", False),
    ],
)
def test_the_start_of_a_request(start: bytes, is_valid: bool) -> None:
    for data in (start, bytearray(start)):
        if is_valid:
            check_start(data)
        else:
            with pytest.raises(Refusal) as raised:
                check_start(data)
            assert raised.value.code == INVALID


@given(st.binary(max_size=12) | st.sampled_from([b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"]), st.integers(0, 40))
def test_a_valid_head_has_no_invalid_start(data: bytes, size: int) -> None:
    if code(data) is None:
        check_start(data[:size])


# Hosts


@each_row(
    ("value", "expected"),
    [
        (b"a", True),
        (b"a.b-c_d~1", True),
        (b"!$&'()*+,;=", True),
        (b"a%2f", True),
        (b"a%aF", True),
        (b"a%2", False),
        (b"a%g0", False),
        (b"a:80", True),
        (b"a:", True),
        (b"a:65535", True),
        (b"a:123456", False),
        (b"a:x", False),
        (b":80", False),
        (b"", False),
        (b"a:80:80", False),
        (b"a" * 255, True),
        (b"a" * 256, False),
        (b"[::1]", True),
        (b"[::1]:80", True),
        (b"[1::2:3.4.5.6]", True),
        (b"[]", False),
        (b"[::1", False),
        (b"[::1%eth0]", False),
        (b"[::1%25eth0]", False),
        (b"[::\xff]", False),
        (b"[127.0.0.1]", False),
        (b"[::1]a", False),
        (b"a/", False),
        (b"a@b", False),
        (b"a b", False),
        (b"a\xe4", False),
        (b"a?", False),
        (b"a#", False),
        (b"a\\", False),
    ],
)
def test_a_host(value: bytes, expected: bool) -> None:
    assert is_host(value) is expected
