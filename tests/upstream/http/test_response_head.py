"""The status line and headers of one response: what is derived from them, and what is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.garbage import without_cycles
from tests.support.rows import each_row
from upstream.http.response_head import ResponseHead, ResponseHeadError, may_begin_response, parse_response_head

OK = b"HTTP/1.1 200 OK\r\n"


def head(*lines: bytes, line: bytes = OK) -> ResponseHead:
    return parse_response_head(line + b"".join(each + b"\r\n" for each in lines) + b"\r\n")


def error(data: bytes) -> str | None:
    """Return the message of the error; None for a valid response."""
    try:
        parse_response_head(data)
    except ResponseHeadError as raised:
        return str(raised)
    return None


@each_row(
    ("line", "lines", "status", "length", "chunked", "keep_alive"),
    [
        (OK, (b"content-length: 12",), 200, 12, False, True),
        (OK, (b"content-length: 12", b"connection: close"), 200, 12, False, False),
        (OK, (b"content-length: 12", b"connection: x, close"), 200, 12, False, False),
        (OK, (b"content-length: 12", b"connection: x", b"connection: close"), 200, 12, False, False),
        (OK, (b"content-length: 12", b"connection: xclose"), 200, 12, False, True),
        (OK, (b"content-length: 12", b"connection: x,y", b"connection: z"), 200, 12, False, True),
        (OK, (b"transfer-encoding: chunked",), 200, None, True, True),
        (OK, (b"Transfer-Encoding: Chunked ",), 200, None, True, True),
        (OK, (), 200, None, False, False),
        (b"HTTP/1.1 503 No\r\n", (b"content-length: 0",), 503, 0, False, True),
        (b"HTTP/1.1 200 \r\n", (b"content-length: 1",), 200, 1, False, True),
        (b"HTTP/1.0 200 OK\r\n", (b"content-length: 1",), 200, 1, False, False),
        (b"HTTP/1.0 200 OK\r\n", (b"content-length: 1", b"connection: keep-alive"), 200, 1, False, True),
        # These statuses have no body, whatever the headers say (RFC 9112, section 6.3).
        (b"HTTP/1.1 204 No Content\r\n", (), 204, 0, False, True),
        (b"HTTP/1.1 204 No Content\r\n", (b"content-length: 5",), 204, 0, False, True),
        (b"HTTP/1.1 304 Not Modified\r\n", (b"transfer-encoding: chunked", b"connection: close"), 304, 0, False, False),
        (b"HTTP/1.1 205 Reset\r\n", (b"content-length: 5",), 205, 5, False, True),
        (b"HTTP/1.1 305 Use\r\n", (b"content-length: 5",), 305, 5, False, True),
        (b"HTTP/1.1 103 Early Hints\r\n", (b"link: x",), 103, None, False, False),
    ],
)
def test_the_framing(line: bytes, lines: tuple[bytes, ...], status: int, length: int | None, chunked: bool, keep_alive: bool) -> None:
    found = head(*lines, line=line)
    assert (found.status, found.length, found.chunked, found.keep_alive) == (status, length, chunked, keep_alive)
    assert {type(found.chunked), type(found.keep_alive)} == {bool} and not isinstance(found.length, bool)


@each_row(
    ("lines", "headers"),
    [
        ((b"x: y",), {b"x": b"y"}),
        ((b"X-Name: Y",), {b"x-name": b"Y"}),
        ((b"x: ax \t", b"z:  a  b"), {b"x": b"ax", b"z": b"a  b"}),
        ((b"x: y\t",), {b"x": b"y"}),
        ((b"x:", b"z: \xff"), {b"x": b"", b"z": b"\xff"}),
        ((b"x: 1", b"x: 2"), {b"x": b"1"}),
        ((b"X: 1", b"x: 2"), {b"x": b"1"}),
        ((b"x: 1", b"X: 2"), {b"x": b"1"}),
        ((b"1: 2",), {b"1": b"2"}),
        ((), {}),
    ],
)
def test_the_headers(lines: tuple[bytes, ...], headers: dict[bytes, bytes]) -> None:
    """The first value of a repeated header applies."""
    assert head(*lines).headers == headers


ENCODING = "its transfer encoding is not 'chunked' alone"


@each_row(
    ("data", "message"),
    [
        (OK + b"\r\n", None),
        (b"HTTP/1.1 200\r\n\r\n", None),
        (b"HTTP/1.0 200 OK\r\n\r\n", None),
        (OK, "not HTTP/1.1"),
        (OK + b"x: y\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\n\r\n", "not HTTP/1.1"),
        (OK + b"x: y\n\r\n", "not HTTP/1.1"),
        (OK + b"x: y\nz: a\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/2.0 200 OK\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/0.9 200 OK\r\n\r\n", "not HTTP/1.1"),
        (b"ICE/1.1 200 OK\r\n\r\n", "not HTTP/1.1"),
        (b"RTSP/1.0 200 OK\r\n\r\n", "not HTTP/1.1"),
        (b"http/1.1 200 OK\r\n\r\n", "not HTTP/1.1"),
        (b"\r\n" + OK + b"\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1  200 OK\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "not HTTP/1.1"),
        (OK + b" x: y\r\n\r\n", "not HTTP/1.1"),
        (OK + b"x: y\r\n z\r\n\r\n", "not HTTP/1.1"),
        (OK + b"x : y\r\n\r\n", "not HTTP/1.1"),
        (OK + b"x: \0\r\n\r\n", "not HTTP/1.1"),
        (OK + b"content-length: -1\r\n\r\n", "not HTTP/1.1"),
        (OK + b"content-length: 1, 1\r\n\r\n", "not HTTP/1.1"),
        (OK + b"content-length: 1\r\ncontent-length: 1\r\n\r\n", "not HTTP/1.1"),
        (OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", "not HTTP/1.1"),
        (OK + b"transfer-encoding: gzip\r\n\r\n", ENCODING),
        (OK + b"transfer-encoding: gzip, chunked\r\n\r\n", ENCODING),
        (OK + b"transfer-encoding: chunked, chunked\r\n\r\n", ENCODING),
        (OK + b"transfer-encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", ENCODING),
        (OK + b"transfer-encoding: chunked\r\nx: y\r\ntransfer-encoding: identity\r\n\r\n", ENCODING),
        (b"HTTP/1.1 204 No Content\r\ntransfer-encoding: gzip\r\n\r\n", ENCODING),
        (OK + b"x: 1\r\nx: 2\r\ntransfer-encoding: chunked\r\n\r\n", None),
        (OK + b"x-transfer-encoding: 1\r\nx: 1\r\nx: 2\r\ntransfer-encoding: chunked\r\n\r\n", None),
    ],
)
def test_an_invalid_head(data: bytes, message: str | None) -> None:
    found = error(data)
    assert found == message if message in (None, ENCODING) else found is not None and found.startswith(message)


@each_row(
    ("data", "expected"),
    [
        (b"", True),
        (b"H", True),
        (b"HTTP/1.", True),
        (b"HTTP/1.0", True),
        (b"HTTP/1.1 ", True),
        (b"HTTP/1.1 2", True),
        (b"HTTP/1.0 \xff\0", True),
        (b"HTTP/1.2", False),
        (b"HTTP/1.1\t", False),
        (b"HTTP/2", False),
        (b"h", False),
        (b"\r\n", False),
        (b" HTTP/1.1 ", False),
    ],
)
def test_the_start_of_a_response(data: bytes, expected: bool) -> None:
    assert may_begin_response(data) is may_begin_response(bytearray(data)) is expected


NAMES = st.sampled_from([b"x", b"X", b"date", b"Date", b"server", b"X-Y"])
VALUES = st.sampled_from([b"", b"a", b"A b", b"\xe4", b"1"])


@given(st.lists(st.tuples(NAMES, VALUES, st.sampled_from([b"", b" ", b"\t"]))), st.integers(200, 599), st.integers(0, 10**15))
def test_any_headers(lines: list[tuple[bytes, bytes, bytes]], status: int, length: int) -> None:
    expected: dict[bytes, bytes] = {}
    for name, value, _ in lines:
        expected.setdefault(name.lower(), value)
    texts = [b"%b: %b%b" % each for each in lines]
    found = head(*texts, b"content-length: %d" % length, line=b"HTTP/1.1 %d\r\n" % status)
    assert found.headers == {**expected, b"content-length": b"%d" % length}
    assert (found.status, found.length) == (status, 0 if status in (204, 304) else length)


@given(st.binary(max_size=30), st.integers(0, 40))
def test_a_valid_head_has_no_invalid_start(behind: bytes, size: int) -> None:
    for data in (behind, OK + behind + b"\r\n\r\n"):
        if error(data) is None:
            assert may_begin_response(data[:size])


def test_a_head_is_a_constant_without_cycles() -> None:
    """A cycle would wait for the garbage collector, for each response."""
    with pytest.raises(AttributeError):
        head().status = 500  # type: ignore[misc]
    with without_cycles():
        head(b"x: y")


def test_an_error_names_its_cause() -> None:
    with pytest.raises(ResponseHeadError, match=r"not HTTP/1\.1: Invalid"):
        parse_response_head(OK + b"content-length: x\r\n\r\n")
