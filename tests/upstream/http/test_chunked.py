"""Bodies in chunks: what a decoder passes on, where the body ends, and what it rejects, in any reads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rows import each_row
from upstream.http.chunked import FRAMING_PER_BYTE, ChunkedDecoder, ChunkedError, FramingTooLargeError

LIMIT = 1000


def decoded(reads: Sequence[bytes], limit: int = LIMIT) -> tuple[bytes, bool, int]:
    """Return the body, whether it is complete, and how many bytes of the last read belong to it."""
    decoder, pieces, at = ChunkedDecoder(limit), list[bytes](), 0
    for read in reads:
        at = decoder.feed(read, 0, pieces.append)
    return b"".join(pieces), decoder.finished, at


def error(reads: Sequence[bytes], limit: int = LIMIT) -> type[Exception] | None:
    """Return the type of the error that the last read causes; None without one. An earlier read causes none."""
    decoder = ChunkedDecoder(limit)
    for read in reads[:-1]:
        decoder.feed(read, 0, lambda _: None)
    try:
        decoder.feed(reads[-1], 0, lambda _: None)
    except (ChunkedError, FramingTooLargeError) as raised:
        return type(raised)
    return None


def outcome(reads: Sequence[bytes], limit: int = LIMIT) -> tuple[bytes, bool | type[Exception]]:
    """Return the body before the error or the end, and the error, or whether the body is complete."""
    decoder, pieces = ChunkedDecoder(limit), list[bytes]()
    try:
        for read in reads:
            decoder.feed(read, 0, pieces.append)
    except (ChunkedError, FramingTooLargeError) as raised:
        return b"".join(pieces), type(raised)
    return b"".join(pieces), decoder.finished


def single_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


WHOLE = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


@each_row(
    ("data", "body"),
    [
        (WHOLE, b"abcde"),
        (b"0\r\n\r\n", b""),
        (b"000\r\n\r\n", b""),
        (b"003\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"a\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
        (b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
        (b"10\r\n0123456789abcdef\r\n0\r\n\r\n", b"0123456789abcdef"),
        (b"5\r\n\r\n0\r\n\r\n0\r\n\r\n", b"\r\n0\r\n"),
        (b"1;e\r\na\r\n0\r\n\r\n", b"a"),
        (b"1;e=1;f=g\r\na\r\n0;x\r\n\r\n", b"a"),
        (b'1;e="a;\\"\\\\\t \xff"\r\na\r\n0\r\n\r\n', b"a"),
        (b"1\r\na\r\n0\r\nt: v\r\n\r\n", b"a"),
        (b"1\r\na\r\n0\r\nt:\r\nU-1: a\tb \xe4\r\n\r\n", b"a"),
    ],
)
def test_a_body(data: bytes, body: bytes) -> None:
    """The bytes behind it do not belong to it, whatever they are."""
    assert decoded([data]) == (body, True, len(data))
    assert decoded([data + b"0\r\n\r\n"]) == (body, True, len(data))
    assert decoded(single_bytes(data)) == (body, True, 1)
    assert decoded([*single_bytes(data), b"x"]) == (body, True, 0)


@each_row(
    "data",
    [
        b"\r\n",
        b"g\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1\n",
        b"1\r\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b"1" * 16 + b"\r\n",
        b"1;\r\n",
        b"1;;e\r\n",
        b"1; e\r\n",
        b"1;e=\r\n",
        b"1;e=1=2\r\n",
        b"1;e,f\r\n",
        b'1;e="a\r\n',
        b'1;e="\\\x80\r\n',
        b'1;e="\x01"\r\n',
        b"1\r\nab",
        b"1\r\na\n",
        b"1\r\na\rb",
        b"1\r\na0",
        b"0\r\n\n",
        b"0\r\n:v\r\n",
        b"0\r\nt\r\n",
        b"0\r\nt : v\r\n",
        b"0\r\n t: v\r\n",
        b"0\r\nt: v\n",
        b"0\r\nt: \x00\r\n",
        b"0\r\nt: \x7f\r\n",
        b"0\r\nt: a\r\r\n",
        b"0\r\ncontent-length: 3\r\n",
        b"0\r\nContent-Length:3\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_bytes_that_are_no_chunked_body(data: bytes) -> None:
    """The last byte decides, in one read and in many."""
    assert error([data]) is error(single_bytes(data)) is ChunkedError
    assert error([data[:-1]]) is None


def test_the_largest_size() -> None:
    decoder = ChunkedDecoder(LIMIT)
    assert decoder.feed(b"f" * 15 + b"\r\nab", 0, lambda _: None) == 19 and not decoder.finished


def test_a_trailer_may_have_a_similar_name() -> None:
    for name in (b"content-length2", b"x-transfer-encoding", b"content-encoding"):
        assert decoded([b"0\r\n%b: 1\r\n\r\n" % name])[1]


def test_each_chunk_is_one_piece() -> None:
    pieces = list[bytes]()
    decoder = ChunkedDecoder(LIMIT)
    for read in (b"5\r\nab", b"cde\r\n1\r\nf", b"\r\n0\r\n\r\n"):
        decoder.feed(read, 0, pieces.append)
    assert pieces == [b"ab", b"cde", b"f"]


def test_decoding_starts_at_an_index() -> None:
    pieces = list[bytes]()
    data = b"HEAD" + WHOLE + b"NEXT"
    assert ChunkedDecoder(LIMIT).feed(data, 4, pieces.append) == len(data) - 4
    assert pieces == [b"abc", b"de"]


@each_row(
    ("data", "between"),
    [
        (b"", True),
        (b"3", False),
        (b"3\r", False),
        (b"3\r\n", False),
        (b"3\r\nab", False),
        (b"3\r\nabc", False),
        (b"3\r\nabc\r", False),
        (b"3\r\nabc\r\n", True),
        (b"3\r\nabc\r\n0\r\n", False),
        (b"3\r\nabc\r\n0\r\nt: v\r\n", False),
        (WHOLE, False),
    ],
)
def test_whether_the_next_byte_starts_a_chunk(data: bytes, between: bool) -> None:
    for reads in ([data], single_bytes(data)):
        decoder = ChunkedDecoder(LIMIT)
        for read in reads:
            decoder.feed(read, 0, lambda _: None)
        assert decoder.between_chunks is between


# The limit of the framing

LAST = b"0\r\n\r\n"


@each_row(
    ("data", "size"),
    [
        (b"0;%b\r\n\r\n" % (b"e" * 40), 46),  # the empty line counts
        (b"0\r\nt: %b\r\n\r\n" % (b"v" * 40), 50),
        (b"0\r\n" + b"t: v\r\n" * 10 + b"\r\n", 65),
        (b"1\r\na\r\n0;%b\r\n\r\n" % (b"e" * 40), 48),  # the first chunk pays for its size, and not for its line end
        (b"1;%b\r\na\r\n0\r\n\r\n" % (b"e" * 40), 44),  # the extension, less the byte's allowance, is below its first line
    ],
)
def test_the_limit_of_the_framing(data: bytes, size: int) -> None:
    for reads in ([data], single_bytes(data)):
        assert outcome(reads, size) == (b"a" if b"\na\r" in data else b"", True)
        assert outcome(reads, size - 1)[1] is FramingTooLargeError


def test_a_byte_of_a_body_pays_for_its_framing() -> None:
    """Chunks of one byte with eight bytes of framing need no more than the limit of one chunk. With nine bytes, each adds one."""
    assert FRAMING_PER_BYTE == 8
    assert outcome([b"1;ab\r\na\r\n" * 1000 + LAST], 8) == (b"a" * 1000, True)
    assert outcome([b"1;ab\r\na\r\n" * 2 + LAST], 7)[1] is FramingTooLargeError
    assert outcome([b"1;abc\r\na\r\n" * 1000 + LAST], LIMIT)[1] is FramingTooLargeError
    assert outcome([b"1;abc\r\na\r\n" * 900 + LAST], LIMIT)[1] is True


def test_a_large_body_does_not_pay_for_later_framing() -> None:
    data = b"1000\r\n" + b"a" * 0x1000 + b"\r\n" + b"0;%b\r\n" % (b"e" * 60)
    assert outcome([data], 65)[1] is FramingTooLargeError
    assert outcome([data], 66)[1] is False


# Properties

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)
CUTS = st.lists(st.integers(1, 12), max_size=20)
GARBAGE = st.sampled_from([b"\r", b"\n", b"0", b";", b"f", b"\r\n", b"x", b":"])


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


def framed(chunks: list[bytes], trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailers + b"\r\n"


@given(BODIES, st.sampled_from([b"", b"t: v\r\n"]), CUTS, st.binary(max_size=5))
def test_a_body_does_not_depend_on_reads(chunks: list[bytes], trailers: bytes, sizes: list[int], behind: bytes) -> None:
    data = framed(chunks, trailers)
    assert decoded([data + behind]) == (b"".join(chunks), True, len(data))
    body, finished, _ = decoded(cut(data + behind, sizes))
    assert (body, finished) == (b"".join(chunks), True)


@given(BODIES, st.floats(0, 1), GARBAGE, CUTS, st.integers(8, 40))
def test_an_error_does_not_depend_on_reads(chunks: list[bytes], where: float, garbage: bytes, sizes: list[int], limit: int) -> None:
    data = framed(chunks, b"t: v\r\n")
    at = int(where * len(data))
    changed = data[:at] + garbage + data[at:]
    assert outcome(cut(changed, sizes), limit) == outcome([changed], limit) == outcome(single_bytes(changed), limit)


def test_the_messages() -> None:
    for data, text in (
        (b"x\r\n", "the size of a chunk is not valid"),
        (b"1\r\nab", "a chunk is longer than its size"),
        (b"0\r\nt\r\n", "a trailer is not valid"),
        (b"1;" + b"e" * LIMIT, f"the framing of the body is larger than {LIMIT} bytes"),
    ):
        with pytest.raises(ValueError, match=text):
            decoded([data])
