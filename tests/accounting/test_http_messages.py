"""Stored connections are parsed message by message, also if they are truncated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.accounting.http_messages import parse_messages

PIECES = st.lists(st.binary(min_size=1, max_size=20), max_size=4)


def chunked(pieces: list[bytes]) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def sized(pieces: list[bytes]) -> bytes:
    body = b"".join(pieces)
    return b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\nx-request-id: one\r\n\r\n%b" % (len(body), body)


@given(st.lists(st.tuples(st.booleans(), PIECES), max_size=4), st.data())
def test_only_the_last_message_of_a_truncated_connection_is_not_whole(
    responses: list[tuple[bool, list[bytes]]], data: st.DataObject
) -> None:
    written = [(chunked if is_chunked else sized)(pieces) for is_chunked, pieces in responses]
    connection = b"".join(written)
    found = list(parse_messages(connection))
    assert [message.body for message in found] == [b"".join(pieces) for _, pieces in responses]
    assert [message.status for message in found] == [200 if is_chunked else 503 for is_chunked, _ in responses]
    assert all(message.whole for message in found)
    end = data.draw(st.integers(0, len(connection)))
    truncated = list(parse_messages(connection[:end]))
    assert [message.whole for message in truncated[:-1]] == [True] * len(truncated[:-1])
    for message, expected in zip(truncated, found, strict=False):
        assert expected.body.startswith(message.body) and (not message.whole or message.body == expected.body)


def test_headers_are_in_lower_case() -> None:
    [message] = parse_messages(b"POST / HTTP/1.1\r\nX-Request-Id: req_1\r\nContent-Length: 2\r\n\r\n{}")
    assert (message.first_line, message.headers["x-request-id"], message.body) == (b"POST / HTTP/1.1", "req_1", b"{}")
