"""The parser of requests: what it makes of bytes, however they are cut."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.client.http.framing import AHEAD, HttpParser, Reading
from gateway.client.http.head import MAX_HEAD, MAX_HEADERS, RequestHead

LINE, HOST = b"POST /v1/chat/completions HTTP/1.1\r\n", b"host: a\r\n"


@dataclass
class Received:
    """One request, as far as it was received."""

    head: RequestHead
    size: int = 0
    is_awaited: bool = True
    body: bytes = b""
    finished: bool = False
    failed: Refusal | None = None

    def feed(self, data: bytes) -> None:
        assert not self.finished
        self.body += data
        self.size += len(data)

    def finish(self) -> None:
        assert not self.finished
        self.finished = True

    def fail(self, refusal: Refusal) -> None:
        self.failed = refusal

    @property
    def seen(self) -> tuple[object, ...]:
        """All that is known of the request."""
        head = self.head
        return (head.method, head.url, list(head.headers.items()), list(head.fields), head.http10, head.content_length, head.keep_alive,
                self.body, self.finished)  # fmt: skip


@dataclass
class Handler:
    """Records requests. ``parser``: of a handler that wants one request at a time."""

    received: list[Received] = field(default_factory=list)
    parser: HttpParser | None = None
    calls: int = 0
    follows: int = 0

    def request_received(self, head: RequestHead) -> Received:
        self.received.append(Received(head))
        if self.parser is not None:
            self.parser.is_blocked = True
        return self.received[-1]

    def body_follows(self) -> None:
        assert self.received[-1].body == b"", "the request is started before its body"
        self.follows += 1

    def body_stored(self) -> None:
        self.calls += 1


def parsed(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], str | None, Reading]:
    """Parse the pieces. Returns the requests, the code of the refusal, and what the parser expects next."""
    handler, refused = Handler(), None
    parser = HttpParser(handler)
    for piece in pieces:
        try:
            parser.feed(piece)
            while parser.reading is Reading.BODY and parser.stored:
                parser.feed(b"")
        except Refusal as refusal:
            refused = refusal.code
            parser.stop()
    reading = parser.reading
    parser.close()
    return [each.seen for each in handler.received], refused, reading


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut data into pieces of these sizes, and the rest."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [piece for piece in (*pieces, data[at:]) if piece]


def chunks(body: bytes, step: int) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(body[at : at + step]), body[at : at + step]) for at in range(0, len(body), step)) + b"0\r\n\r\n"


def post(body: bytes, *lines: bytes, line: bytes = LINE) -> bytes:
    return line + HOST + b"".join(lines) + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


METHODS = st.sampled_from([b"GET", b"POST", b"DELETE", b"OPTIONS", b"PUT"])
PATHS = st.sampled_from([b"/", b"/v1/models?a=b", b"/a%20b", b"*", b"/x HTTP/1.1".replace(b" ", b"%20")])
NAMES = st.sampled_from([b"x", b"Accept", b"X-Forwarded-For", b"ACCEPT"])
VALUES = st.sampled_from([b"", b"y", b"a, b", b"POST / HTTP/1.1", b"\xe4"])
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=4)
OFFERS = st.sampled_from([b"", b"", b"connection: Upgrade\r\nupgrade: h2c\r\n"])
BODIES = st.sampled_from([b"", b"{}", b"GET / HTTP/1.1\r\n\r\n", b"\r\n" * 40, b"a" * 3000])
SIZES = st.lists(st.integers(1, 120), max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One valid request, after which the connection stays open."""
    head = b"%b %b HTTP/1.1\r\nhost: a\r\n" % (draw(METHODS), draw(PATHS))
    head += b"".join(b"%b: %b\r\n" % each for each in draw(FIELDS))
    body = draw(BODIES)
    match draw(st.integers(0, 2)):
        case 0:
            return head + b"\r\n"
        case 1:
            return head + draw(OFFERS) + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        case _:
            return head + draw(OFFERS) + b"transfer-encoding: chunked\r\n\r\n" + chunks(body, draw(st.integers(1, 900)))


@settings(deadline=None)
@given(st.lists(requests(), min_size=1, max_size=5), SIZES)
def test_requests_are_the_same_however_they_are_cut(messages: list[bytes], sizes: list[int]) -> None:
    data = b"".join(messages)
    expected = parsed([data])
    assert len(expected[0]) == len(messages) and expected[1:] == (None, Reading.NEXT_REQUEST)
    assert all(finished for *_, finished in expected[0])
    assert parsed(cut(data, sizes)) == expected
    assert parsed(messages) == expected, "a request in each read"
    assert parsed([bytes([byte]) for byte in data]) == expected


@settings(deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3), SIZES)
def test_changed_bytes_are_not_read_in_two_ways(messages: list[bytes], at: float, gone: int, put: bytes, sizes: list[int]) -> None:
    """Requests that were received before the refusal are the same. The last of them may have received more of its body."""
    data = b"".join(messages)
    position = int(at * len(data))
    data = data[:position] + put + data[position + gone :]
    one, other = parsed([data]), parsed(cut(data, sizes))
    complete = [[seen for seen in result[0] if seen[-1]] for result in (one, other)]
    shorter, longer = sorted(complete, key=len)
    assert longer[: len(shorter)] == shorter
    assert one[1:] == other[1:] and len(shorter) == len(longer)


@settings(deadline=None)
@given(FIELDS, st.lists(BODIES, min_size=2, max_size=6))
def test_a_repeated_request_is_the_same_as_a_parsed_one(fields: list[tuple[bytes, bytes]], bodies: list[bytes]) -> None:
    lines = b"".join(b"%b: %b\r\n" % each for each in fields)
    messages = [post(body, lines) + b"" for body in bodies]
    assert parsed(messages) == parsed([bytes([byte]) for message in messages for byte in message])


REPEATED = post(b"{}")
SECOND = {
    "a longer length": post(b"{}").replace(b": 2", b": 3"),
    "a shorter length": post(b"{}").replace(b": 2", b": 1"),
    "another request behind it": post(b"{}") * 2,
    "half of another behind it": post(b"{}") + b"POS",
    "a blank line behind it": post(b"{}") + b"\r\n",
    "a blank line before it": b"\r\n" + post(b"{}"),
    "a length with a plus": post(b"{}").replace(b": 2", b": +2"),
    "a length behind zeros": post(b"{}").replace(b": 2", b": 002"),
    "a length with a space": post(b"{}").replace(b": 2", b": 2 "),
    "no length": post(b"{}").replace(b": 2", b": "),
    "a second length": post(b"{}").replace(b": 2\r\n", b": 2\r\ncontent-length: 2\r\n"),
    "another host": post(b"{}").replace(b"host: a", b"host: a b"),
    "another line": post(b"{}", line=LINE.replace(b" /", b"  /")),
    "another header": post(b"{}", b"x: y\r\n"),
    "the end of the connection": post(b"{}", b"connection: close\r\n"),
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND.keys())
def test_what_is_almost_a_repeated_request(second: bytes) -> None:
    pieces = [REPEATED, REPEATED, second, REPEATED]
    assert parsed(pieces) == parsed([bytes([byte]) for piece in pieces for byte in piece])


KEYS = st.sampled_from(
    [b"Bearer sk-1", b"Bearer sk-22", b"bearer sk-1", b"Bearer  sk-1", b"Bearer sk-1 ", b"Bearer", b"", b"Bearer sk\xe4", b"Bearer a b",
     b"Bearer a\x01", b"Bearer a\tb", b"Bearer a\r\nx: y", b"Bearer a\r\ncontent-length: 2", b"Bearer " + b"a" * 5000, b"Basic x"]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(KEYS, BODIES, st.booleans()), min_size=2, max_size=8), st.booleans())
def test_requests_with_other_keys_are_the_same_as_parsed_ones(sent: list[tuple[bytes, bytes, bool]], key_is_last: bool) -> None:
    messages = []
    for key, body, has_other_header in sent:
        lines = [b"Authorization: %b\r\n" % key, b"Content-Length: %d\r\n" % len(body)]
        lines = lines[:: -1 if key_is_last else 1] + [b"x: y\r\n"] * has_other_header
        messages.append(LINE + HOST + b"".join(lines) + b"\r\n" + body)
    assert parsed(messages) == parsed([bytes([byte]) for message in messages for byte in message])


def test_a_key_that_makes_the_head_too_large() -> None:
    sent = [post(b"{}", b"authorization: Bearer %b\r\n" % key) for key in (b"sk-1", b"sk-1", b"a" * MAX_HEAD)]
    received, refused, _ = parsed(sent)
    assert len(received) == 2 and refused == "headers_too_large"


# One reading of every byte


def test_the_end_of_a_request_is_not_read_as_another_one() -> None:
    """A header value of one client may equal a whole request of another one, also if it ends at the end of a read."""
    end = LINE + b"Content-Length: 2\r\n\r\nhi"
    pieces = [post(b"hi"), LINE + HOST + b"Authorization: Bearer ALICE\r\nX: ", end, end]
    received, refused, _ = parsed(pieces)
    assert [b"Bearer ALICE" in str(each).encode() for each in received] == [False, True]
    assert refused == "invalid_request", "the last read is a request without Host"
    assert parsed([b"".join(pieces)]) == (received, refused, Reading.NOTHING)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_another_protocol_is_refused_however_it_is_cut(step: int) -> None:
    data = b"SOURCE /v1/models ICE/1.1\r\n" + HOST + b"\r\n"
    assert parsed([data[at : at + step] for at in range(0, len(data), step)]) == ([], "invalid_request", Reading.NOTHING)


def test_bytes_behind_a_request_are_not_parsed_while_the_handler_is_busy() -> None:
    handler = Handler()
    parser = handler.parser = HttpParser(handler)
    wire = b"".join(post(b"%d" % number) for number in range(4))
    for data in (wire[:100], wire[100:-10], b"", wire[-10:], b""):
        parser.feed(data)
        parser.is_blocked = False
    assert [each.body for each in handler.received] == [b"0", b"1", b"2", b"3"]
    assert not parser.stored


# Bounds

REFUSED = {
    "too many headers": (LINE + HOST + b"x: y\r\n" * MAX_HEADERS + b"\r\n", "headers_too_large"),
    "a target that is too long": (b"GET /" + b"a" * MAX_HEAD + b" HTTP/1.1\r\n" + HOST + b"\r\n", "headers_too_large"),
    "a header that is too long": (LINE + HOST + b"x: " + b"a" * MAX_HEAD + b"\r\n\r\n", "headers_too_large"),
    "trailers that are too long": (
        LINE + HOST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * MAX_HEAD + b"\r\n\r\n",
        "headers_too_large",
    ),
    "extensions that are too long": (
        LINE + HOST + b"transfer-encoding: chunked\r\n\r\n" + b"1;%b\r\na\r\n" % (b"e" * 1000) * 70,
        "headers_too_large",
    ),
    "a chunk size that is not hexadecimal": (LINE + HOST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", "invalid_request"),
    "a chunk size beyond 64 bits": (LINE + HOST + b"transfer-encoding: chunked\r\n\r\n1ffffffffffffffff\r\n", "invalid_request"),
    "a chunk that is longer than its size": (LINE + HOST + b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n", "invalid_request"),
    "an unknown method": (b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n", "invalid_request"),
    "another protocol": (b"\x16\x03\x01\x02\x00", "invalid_request"),
}


@pytest.mark.parametrize(("data", "code"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("size", [1 << 20, 1000, 7])
def test_a_refusal_does_not_depend_on_reads(data: bytes, code: str, size: int) -> None:
    received, refused, reading = parsed([REPEATED, *(data[at : at + size] for at in range(0, len(data), size)), REPEATED])
    assert (refused, reading) == (code, Reading.NOTHING)
    assert received[0][-2:] == (b"{}", True) and len(received) <= 2, "nothing is parsed behind it"


@pytest.mark.parametrize("size", [MAX_HEAD - 14, MAX_HEAD - 5, MAX_HEAD - 1, MAX_HEAD])
@pytest.mark.parametrize("read", [1 << 20, 1000])
def test_a_request_line_that_is_just_too_long(size: int, read: int) -> None:
    data = b"GET /" + b"a" * size + b" HTTP/1.1\r\n" + HOST + b"\r\n"
    assert parsed([data[at : at + read] for at in range(0, len(data), read)])[1] == "headers_too_large"


def test_as_many_headers_as_are_permitted() -> None:
    received, refused, _ = parsed([LINE + HOST + b"x: y\r\n" * (MAX_HEADERS - 1) + b"\r\n"])
    assert refused is None and len(received) == 1


def test_small_chunks_do_not_count_as_headers() -> None:
    body = b"a" * 40_000
    data = LINE + HOST + b"transfer-encoding: chunked\r\n\r\n" + chunks(body, 1)
    received, refused, _ = parsed([data[at : at + 10_000] for at in range(0, len(data), 10_000)])
    assert refused is None and received[0][-2:] == (body, True)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_many_chunks_are_decoded_in_several_iterations(is_blocked: bool) -> None:
    """Also of the request during which the handler wants no other one."""
    handler, body = Handler(), b"a" * 20_000
    parser = HttpParser(handler)
    handler.parser = parser if is_blocked else None
    parser.feed(LINE + HOST + b"transfer-encoding: chunked\r\n\r\n" + chunks(body, 1) + post(b"{}"))
    assert 0 < len(handler.received[0].body) < 5000
    while not handler.received[0].finished:
        calls = handler.calls
        parser.feed(b"")
        assert handler.calls == calls + 1 or handler.received[0].finished
    if is_blocked:
        assert len(handler.received) == 1
        parser.is_blocked = False
        parser.feed(b"")
    assert [each.body for each in handler.received] == [body, b"{}"]


def test_no_further_call_is_needed_for_a_body_without_stored_bytes() -> None:
    handler = Handler()
    HttpParser(handler).feed(LINE + HOST + b"transfer-encoding: chunked\r\n\r\n" + chunks(b"a" * 10, 1).removesuffix(b"0\r\n\r\n"))
    assert (handler.received[0].size, handler.calls) == (10, 0)


def test_empty_lines_before_a_request() -> None:
    """Each request may have as many as a request line and headers have bytes."""
    lines = b"\r\n" * (MAX_HEAD // 2)
    assert parsed([lines + REPEATED, lines, REPEATED])[1:] == (None, Reading.NEXT_REQUEST)
    assert parsed([lines + b"\r\n"])[1] == parsed([REPEATED, lines, b"\r\n"])[1] == "headers_too_large"


def test_the_start_of_a_request_is_bounded_and_checked_before_its_end() -> None:
    """The client of another protocol gets its response at once."""
    start = LINE + HOST + b"x: "
    filled = start + b"a" * (MAX_HEAD - len(start))
    for reads in ([filled], [filled[:-1], filled[-1:]], [filled[:9], filled[9:]]):
        assert parsed(reads)[1:] == (None, Reading.HEAD)
        assert parsed([*reads, b"a"])[1] == "headers_too_large"
    for invalid in ([b"\x16"], [b"GE", b"\x16"], [b"GET / HTTP/1.1\r", b"x"], [b"G", b"ET / ICE/1.1\r\n"], [b"GET / HTTP/1.1", b"\n"]):
        assert parsed(invalid) == ([], "invalid_request", Reading.NOTHING)


def test_the_number_of_requests() -> None:
    parser = HttpParser(Handler())
    assert (parser.number, parser.reading) == (0, Reading.FIRST_REQUEST)
    parser.feed(b"\r")
    assert (parser.number, parser.reading) == (0, Reading.FIRST_REQUEST)
    parser.feed(b"\n" + REPEATED)
    assert (parser.number, parser.reading) == (1, Reading.NEXT_REQUEST)
    for size in (1, 9, len(REPEATED) - 3):
        seen = []
        for data in (REPEATED[:size], REPEATED[size : size + 1], REPEATED[size + 1 : -1], REPEATED[-1:]):
            parser.feed(data)
            seen.append(parser.reading)
        assert seen[0] is Reading.HEAD and seen[2:] == [Reading.BODY, Reading.NEXT_REQUEST]
    assert parser.number == 4
    parser.feed(REPEATED * 2)
    assert parser.number == 6


def test_a_start_in_many_reads_is_stored_in_place() -> None:
    """Otherwise each read would copy all earlier ones."""
    parser = HttpParser(Handler())
    for data in (b"POST", b" /v1/", b"x"):
        parser.feed(data)
    assert parser.stored == b"POST /v1/x" and isinstance(parser.stored, bytearray)
    parser.stop()
    assert parser.stored == b"" and parser.reading is Reading.NOTHING


@pytest.mark.parametrize(("length", "arrived", "follows"), [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_needs_an_owner(length: int, arrived: int, follows: int, is_chunked: bool) -> None:
    """``length`` and ``arrived`` are beyond the bytes that are passed on before the request is started."""
    assert AHEAD == 65536
    body, handler = b"a" * (AHEAD + length), Handler()
    start = LINE + HOST + b"content-length: %d\r\n\r\n" % len(body)
    if is_chunked:
        start, body = LINE + HOST + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n" % (2 * AHEAD) + body
    HttpParser(handler).feed(start + body[: AHEAD + arrived])
    assert handler.follows == (arrived if is_chunked else follows)
    if not is_chunked:
        assert handler.received[0].finished is (arrived >= length)


# Remembered headers


def received_requests(*messages: bytes) -> list[RequestHead]:
    handler = Handler()
    parser = HttpParser(handler)
    for message in messages:
        parser.feed(message)
    assert len(handler.received) == len(messages)
    return [each.head for each in handler.received]


def numbered(number: int, digits: bytes = b"0", size: int = 0) -> bytes:
    """Return a request with this header and Content-Length, and of this size."""
    start = LINE + HOST + b"x: %d%b\r\ncontent-length: %b\r\nz: y" % (number, b"-abc", digits)
    return start + b"y" * (size - len(start) - 4) + b"\r\n\r\n" + b"a" * int(digits)


def test_a_repeated_head_is_not_parsed_again() -> None:
    """Its values are the same objects. With another length, all others are."""
    first, second, third = received_requests(numbered(1), numbered(1), numbered(1, b"12"))
    assert second is first and third is not first
    assert third.headers[b"x"] is first.headers[b"x"] and third.content_length == 12


@pytest.mark.parametrize(("digits", "is_remembered"), [(b"0" * 15, True), (b"0" * 16, False)])
def test_the_digits_of_a_remembered_length(digits: bytes, is_remembered: bool) -> None:
    first, second = received_requests(numbered(1), numbered(1, digits))
    assert (second.headers[b"x"] is first.headers[b"x"]) is is_remembered


@pytest.mark.parametrize(("size", "is_remembered"), [(4096, True), (4097, False)])
def test_the_size_of_a_remembered_head(size: int, is_remembered: bool) -> None:
    message = numbered(1, size=size)
    assert len(message) == size
    first, second = received_requests(message, message)
    assert (second is first) is is_remembered


def test_which_head_is_remembered() -> None:
    """The first one, until others have come twice: a connection may have several clients."""
    one, two = numbered(1), numbered(2)
    found = received_requests(one, one, two, one, two, one)
    assert all(found[at] is found[0] for at in (1, 3)) and found[4] is not found[2] and found[5] is not found[0]
    found = received_requests(one, one, two, two, two, one)
    assert found[3] is not found[2] and found[4] is found[3] and found[5] is not found[0]
    found = received_requests(one, two, two, two)
    assert found[3] is found[2]


# The last request, and offers of other protocols


@pytest.mark.parametrize("pieces", [1, 2])
def test_nothing_is_parsed_behind_the_last_request(pieces: int) -> None:
    data = post(b"{}", b"connection: close\r\n")
    received, refused, _ = parsed([data + b"rubbish"] if pieces == 1 else [data, b"rubbish"])
    assert [each[-2:] for each in received] == [(b"{}", True)] and refused is None


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_handler_can_make_a_request_the_last_one(pieces: int) -> None:
    """Its body is received, and nothing behind it."""
    handler = Handler()
    parser = HttpParser(handler)
    parser.feed(REPEATED[:-1])
    parser.is_last = True
    for piece in [b"}" + REPEATED] if pieces == 1 else [b"}", REPEATED]:
        parser.feed(piece)
    assert [(each.body, each.finished) for each in handler.received] == [(b"{}", True)]


OFFER = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


def test_a_declined_offer_without_a_body_is_the_last_request() -> None:
    received, refused, _ = parsed([OFFER + b"\x81\x05hello", b"more"])
    assert refused is None and [(each[0], each[-1]) for each in received] == [(b"GET", True)]


def test_many_offers_in_one_read() -> None:
    received, refused, _ = parsed([post(b"{}", b"connection: upgrade\r\nupgrade: h2c\r\n") * 2000])
    assert refused is None and len(received) == 2000


def test_a_closed_parser_has_no_references() -> None:
    """Else each connection would wait for the garbage collector."""
    parser = HttpParser(Handler())
    parser.feed(REPEATED[:-1])
    parser.close()
    assert parser.receiver is None and parser.reading is Reading.NOTHING
    parser.feed(b"}")
    assert getattr(parser, "_handler", None) is None and parser.receiver is None
