"""Events come out whole and unchanged, however the stream was cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from upstream.http.sse import EventTooLongError, Splitter, data_of, split

# Bytes in which every kind of line end, field and half of one is frequent.
PIECES = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b"data: ", b"data:", b"event: x", b": note", b"a", b"{", b" ", b"\xf0\x9f", b"\x8c\x8d", b""]
)
STREAMS = st.lists(PIECES, max_size=30).map(b"".join)
CUTS = st.lists(st.integers(0, 200), max_size=10)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({min(offset, len(data)) for offset in cuts})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]


def lines_of(data: bytes) -> list[bytes]:
    """The lines of a whole stream, each with its end, told one character at a time (WHATWG HTML, section 9.2.5)."""
    lines, line, at = [], b"", 0
    while at < len(data):
        end = b"\r\n" if data[at : at + 2] == b"\r\n" else data[at : at + 1] if data[at : at + 1] in b"\r\n" else b""
        line += end or data[at : at + 1]
        at += len(end) or 1
        if end:
            lines.append(line)
            line = b""
    return [*lines, line] if line else lines


def events_of(data: bytes) -> list[bytes]:
    """The stream's events by its lines: a blank one ends an event; blank ones with nothing before them go with the one before."""
    events, event = [], b""
    for line in lines_of(data):
        event += line
        if not line.strip(b"\r\n") and line[-1:] in (b"\r", b"\n"):
            events.append(event)
            event = b""
    return [*events, event] if event else events


@settings(deadline=None)
@given(STREAMS, CUTS)
@example(b"a\r\n\r\nb\n\n", [3, 4])
@example(b"a\r\r\n\nb", [2])
def test_nothing_is_lost_or_changed(data: bytes, cuts: list[int]) -> None:
    splitter = Splitter(1000)
    out = b"".join(splitter.feed(piece) for piece in cut(data, cuts))
    assert out + splitter.take() == data
    assert splitter.take() == b""


@settings(deadline=None)
@given(STREAMS, CUTS)
def test_what_comes_out_ends_with_a_blank_line(data: bytes, cuts: list[int]) -> None:
    splitter = Splitter(1000)
    for piece in cut(data, cuts):
        out = splitter.feed(piece)
        if out:
            last = lines_of(out)[-1]
            assert last in (b"\n", b"\r", b"\r\n"), out


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"data: {}", b"event: a\ndata: b", b": c", b"data: \xe4\xbd\xa0"]), max_size=8), CUTS)
def test_an_event_comes_out_with_its_last_byte(bodies: list[bytes], cuts: list[int]) -> None:
    data, seen = b"".join(body + b"\n\n" for body in bodies), 0
    splitter = Splitter(1000)
    for piece in cut(data, cuts):
        seen += len(piece)
        splitter.feed(piece)
        assert len(splitter.held) == len(data[:seen]) - (data[:seen].rfind(b"\n\n") + 2 if b"\n\n" in data[:seen] else 0)


@settings(deadline=None)
@given(STREAMS)
def test_split_joins_to_what_it_was(data: bytes) -> None:
    assert b"".join(split(data)) == data


@settings(deadline=None)
@given(st.lists(st.lists(PIECES.filter(lambda piece: piece.strip(b"\r\n") != b""), min_size=1, max_size=4).map(b"".join), max_size=6),
       st.sampled_from([b"\n", b"\r", b"\r\n"]))  # fmt: skip
def test_split_is_the_reference(bodies: list[bytes], end: bytes) -> None:
    data = b"".join(body + end + end for body in bodies)
    assert split(data) == events_of(data) == [body + end + end for body in bodies]


@settings(deadline=None)
@given(STREAMS)
def test_data_is_the_references(data: bytes) -> None:
    lines = [line.rstrip(b"\r\n") for line in lines_of(data)]
    values = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    assert data_of(data) == b"\n".join(values)


@settings(deadline=None)
@given(st.integers(1, 50), CUTS)
def test_what_is_held_is_bounded(limit: int, cuts: list[int]) -> None:
    splitter = Splitter(limit)
    with pytest.raises(EventTooLongError):  # noqa: PT012  # which of the pieces is one too many depends on the cuts
        for piece in cut(b"x" * (limit + 1), cuts):
            splitter.feed(piece)
    ended = Splitter(limit)
    for piece in cut(b"x" * limit, cuts):
        assert ended.feed(piece) == b""
    assert ended.feed(b"\n\n") == b"x" * limit + b"\n\n", "an event that ends within the bound passes"


def test_a_long_event_held_in_many_pieces_is_searched_once() -> None:
    splitter = Splitter(1 << 22)
    for _ in range(40_000):  # quadratic work would take minutes
        assert splitter.feed(b"x" * 100) == b""
    assert len(splitter.feed(b"\n\n")) == 4_000_002
