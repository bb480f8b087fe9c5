"""The Redis protocol: replies are parsed from pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.redis.resp import Parser, ProtocolError, Reply, ReplyError, command

_SIMPLE = st.one_of(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=30), st.none())
REPLIES = st.recursive(_SIMPLE, lambda below: st.lists(below, max_size=4), max_leaves=8)


def encoded(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n%b" % (len(reply), b"".join(map(encoded, reply)))
    raise TypeError(reply)


@given(st.lists(REPLIES, max_size=5), st.integers(1, 7))
def test_replies_are_parsed_from_pieces_of_any_size(replies: list[Reply], size: int) -> None:
    data, parser = b"".join(map(encoded, replies)), Parser()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [reply for piece in pieces for reply in parser.feed(piece)] == replies


def test_simple_strings_and_errors() -> None:
    simple, error, nothing = Parser().feed(b"+OK\r\n-NOSCRIPT No matching script\r\n*-1\r\n")
    assert simple == b"OK" and nothing is None
    assert isinstance(error, ReplyError) and str(error) == "NOSCRIPT No matching script"


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n", b":x\r\n", b"$a\r\n"])
def test_an_invalid_reply_is_rejected(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(Parser().feed(data))


def test_commands() -> None:
    assert command("SET", b"k", 1.5) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\n1.5\r\n"
