"""Requests on one connection, in any reads: the gateway's parser against llhttp and h11.

Many cases repeat a read that equals an earlier whole request in another state of the parser, because only the state may decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from gateway.api.errors import Refusal
from gateway.client.http.framing import HttpParser
from gateway.client.http.head import RequestHead
from tests.fuzz.differential.cases import Case, check, choose, cut, has_empty_extension, mutated, single_bytes
from tests.fuzz.differential.references import Fields, Message, Reading, h11_request, llhttp_request

_BY_BYTES = 1 / 8
"""The share of cases that are also read byte by byte."""
_BY_H11 = 1 / 8
"""The share of cases that h11 reads as well; every refused request is read by h11 too."""


class _Request(NamedTuple):
    method: bytes
    target: bytes
    fields: Fields
    http10: bool
    keep_alive: bool
    body: bytes
    complete: bool


class _Body:
    """Receives one body."""

    is_awaited = False

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.pieces: list[bytes] = []
        self.size = 0
        self.complete = False

    def feed(self, data: bytes) -> None:
        check(not self.complete, "no bytes behind the end of a body", data)
        self.pieces.append(bytes(data))

    def finish(self) -> None:
        check(not self.complete, "a body ends once")
        self.complete = True

    def fail(self, refusal: Refusal) -> None:
        """Ignore it: ``_read`` stores the refusal."""

    def request(self) -> _Request:
        head = self.head
        return _Request(head.method, head.url, tuple(head.fields), head.http10, head.keep_alive, b"".join(self.pieces), self.complete)


class _Handler:
    def __init__(self) -> None:
        self.bodies: list[_Body] = []

    def request_received(self, head: RequestHead) -> _Body:
        check(not self.bodies or self.bodies[-1].complete, "a request starts behind the end of the one before")
        self.bodies.append(_Body(head))
        return self.bodies[-1]

    def body_follows(self) -> None:
        check(self.bodies[-1].size == 0, "a request starts before its large body")

    def body_stored(self) -> None:
        """Do nothing: the bodies here have few chunks."""


class _Result(NamedTuple):
    requests: list[_Request]
    refused: bool
    is_last: bool


def _read(reads: Iterable[bytes]) -> _Result:
    """Return what the gateway's parser reads. An incomplete body of a refused request has no meaning."""
    handler = _Handler()
    parser = HttpParser(handler)
    refused = False
    try:
        for read in reads:
            parser.feed(read)
    except Refusal:
        refused = True
    is_last = parser.is_last
    parser.close()
    for body in handler.bodies:
        _check_headers(body.head)
    requests = [body.request() for body in handler.bodies]
    if refused and requests and not requests[-1].complete:
        requests[-1] = requests[-1]._replace(body=b"")
    return _Result(requests, refused, is_last)


def _check_headers(head: RequestHead) -> None:
    """Check the attributes of a request that are derived from its header fields."""
    expected = dict(head.fields)
    if b"x-forwarded-for" in expected:
        expected[b"x-forwarded-for"] = b",".join(value for name, value in head.fields if name == b"x-forwarded-for")
    check(head.headers == expected, "the headers by name are those of the fields", head)
    length = expected.get(b"content-length")
    has_length = length is not None and head.method != b"CONNECT"
    check(head.content_length == (int(length or 0) if has_length else None), "the length is that of its header", head)


def compare(random: Random, reads: list[bytes], valid: int = 0) -> None:
    """Compare what the parser reads of these reads, of others with the same bytes, and what the references read.

    ``valid``: how many requests at the start are valid by every rule.
    """
    data = b"".join(reads)
    whole = _read([data])
    others = [reads, cut(random, data)]
    if random.random() < _BY_BYTES:
        others.append(single_bytes(data))
    for other in others:
        result = _read(other)
        if result != whole:
            check(False, "the reads change what is read", other, result, [data], whole)
    check(len(whole.requests) >= valid, "a valid request is accepted", data, whole)
    _compare_with_references(data, whole, by_h11=random.random() < _BY_H11)


def _compare_with_references(data: bytes, result: _Result, *, by_h11: bool) -> None:
    at, number = 0, len(result.requests)
    for index, request in enumerate(result.requests):
        reading = llhttp_request(data, at)
        # h11 gives a CONNECT a body, and RFC 9112, section 6.3 does not.
        second = h11_request(data, at) if (by_h11 or reading.message is None) and request.method != b"CONNECT" else None
        agreed = [each.message for each in (reading, second) if each is not None and each.message is not None]
        check(agreed, "a request that no reference accepts", request, data, at)
        for message in agreed:
            _compare(request, message, data, at, is_refused=result.refused and index == number - 1)
        if not request.complete:
            return
        end = agreed[0].end
        check(end is not None, "the end of a request", request, data, at)
        at = end or 0
        if not request.keep_alive:
            check(index == number - 1, "nothing is read behind a last request", data, result)
            return
    readings = llhttp_request(data, at), h11_request(data, at)
    if not result.refused:
        check(
            any(reading.message is None for reading in readings),
            "a request that both references accept is not waited for",
            data,
            at,
            readings,
        )
    else:
        _check_refusal(data, at, readings)


def _compare(request: _Request, message: Message, data: bytes, at: int, *, is_refused: bool) -> None:
    """Check that a request is the message that a reference reads, whose body has no meaning if it is refused later."""
    read = (request.method, request.target), _plain(request.fields), request.http10
    check(
        read == (message.first, _plain(message.fields), message.version != "1.1"),
        "a reference reads another request",
        request,
        message,
        data,
        at,
    )
    if not request.http10 and request.keep_alive:
        check(message.keep_alive, "a connection that a reference closes", request, message, data, at)
    if not is_refused:
        check(request.body == message.body, "a reference reads another body", request, message, data, at)
        check(request.complete == (message.end is not None), "a reference has another end", request, message, data, at)


def _plain(fields: Fields) -> Fields:
    """Return the fields as h11 reports them: a transfer encoding in lower case."""
    return tuple((name, value.lower() if name == b"transfer-encoding" else value) for name, value in fields)


# Refusals

_HOSTS = {b"h", b"h:80", b"other", b"[::1]"}
_ONCE = (b"authorization", b"x-api-key", b"content-type", b"content-length", b"content-encoding", b"host", b"transfer-encoding")


def _check_refusal(data: bytes, at: int, readings: tuple[Reading, Reading]) -> None:
    """Check that a request is refused for a reason: a reference that refuses it, or a rule of the gateway."""
    messages = [reading.message for reading in readings if reading.message is not None and not reading.refused]
    if len(messages) < 2 or any(message.end is None for message in messages):
        return
    check(
        messages[0][:2] != messages[1][:2] or _is_refused(messages[0]) or _has_bare_line_ends(data[at:]) or has_empty_extension(data[at:]),
        "a request is refused that both references accept",
        data,
        at,
        messages[0],
    )


def _has_bare_line_ends(data: bytes) -> bool:
    """Return whether a line does not end with CRLF, before or in the next request's line and headers. The gateway accepts no other end."""
    head = data.lstrip(b"\r\n")
    start = len(data) - len(head)
    end = head.find(b"\r\n\r\n")
    lines = data[: start + (len(head) if end < 0 else end)].replace(b"\r\n", b"")
    return b"\n" in lines or b"\r" in lines


def _is_refused(message: Message) -> bool:
    """Return whether a stricter rule of the gateway refuses a request (docs/security.md)."""
    names = [name for name, _ in message.fields]
    headers, is_10 = dict(message.fields), message.version == "1.0"
    return (
        any(names.count(name) > 1 for name in _ONCE)
        or (b"transfer-encoding" in headers and (is_10 or headers[b"transfer-encoding"].lower() != b"chunked"))
        or (headers[b"host"] not in _HOSTS if b"host" in headers else not is_10)
        or message.version not in ("1.0", "1.1")
        or len(names) > 100
    )


# Generated requests

_CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
_PATHS = (b"/v1/c", b"/v1/chat/completions")
_TARGETS = (*_PATHS, b"/", b"*", b"/v1/c?x=1", b"http://h/v1/x", b"/x%20HTTP/1.1", b"//", b"h:443", b"/\xc3\xa9")
_METHODS = (*[b"POST"] * 8, b"GET", b"PUT", b"OPTIONS", b"CONNECT", b"HEAD", b"SOURCE", b"PRI", b"post", b"FOO")
_VERSIONS = (
    *[b"HTTP/1.1"] * 12,
    b"HTTP/1.0",
    b"HTTP/1.0",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"http/1.1",
    b"ICE/1.1",
    b"HTTP/1.10",
    b"RTSP/1.0",
    b"HTTP/0.9",
)
_KEYS = (b"Bearer ALICE", b"Bearer BOB", b"Bearer CARLA-LONGER", b"Basic x", b"bearer A B", b"Bearer", b"", b"Bearer  BOB", b"Bearer A\tB")
_NAMED_HOSTS = (b"h", b"h:80", b"other", b"[::1]", b"", b"a b", b"a@b", b"h,other")
_BODIES = (b"", b"hi", b"hi", b"{}", b'{"a":1}', b"POST /v1/c HTTP/1.1\r\n", b"\r\n\r\n", b"x" * 30, b"0\r\n\r\n")
_AUTHORIZATION = (*[b"Authorization"] * 8, b"authorization", b"AUTHORIZATION", b"Authorization ")
_LENGTH = (*[b"Content-Length"] * 8, b"content-length", b"CONTENT-LENGTH")
_LENGTHS: tuple[Callable[[bytes], bytes], ...] = (
    lambda digits: b"0" + digits,
    lambda digits: b"+" + digits,
    lambda digits: b"-" + digits,
    lambda digits: digits + b" ",
    lambda digits: b"\t" + digits,
    lambda digits: digits + b", " + digits,
    lambda digits: b"",
    lambda digits: b"1" * 25,
    lambda digits: b"18446744073709551616",
    lambda digits: b"0x" + digits,
    lambda digits: digits + b"_0",
)
_ENCODINGS = (*[b"chunked"] * 9, b"xchunked", b"chunked, chunked", b"Chunked", b"identity", b"gzip, chunked", b"chunked ", b"")
_CONNECTIONS = (b"close", b"keep-alive", b"Upgrade", b"close, keep-alive", b"upgrade, close", b"close,upgrade", b"x")
_ODD = (
    b" folded",
    b"\tfolded",
    b"bad name: x",
    b": x",
    b"no-colon",
    b"X: a\x00b",
    b"X: a\rb",
    b"X: a\nAuthorization: Bearer BOB",
    b"X:\r\n Authorization: Bearer BOB",
    b"X: \xff",
    b"X: \x01",
    b"\xc3\xa9: x",
    b"X\t: x",
    b"X: " + b"y" * 300,
    b"x-api-key: BOB",
    b"X-Forwarded-For: 1.2.3.4",
    b"Content-Type: application/json",
    b"Content-Length: 2",
    b"Transfer-Encoding: chunked",
    b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Expect: 100-continue",
    b"X: POST /v1/c HTTP/1.1",
    b"Proxy-Connection: close",
    b"Host: h",
)
_SIZES = (*[b"%x"] * 14, b"%X", b"0%x", b"%x;e=1", b'%x;e="a;b"', b"%x ", b"+%x", b"0x%x", b"%x;e=\n", b"%x\n", b"fffffffffffffffff%x")
_TRAILERS = (*[b""] * 6, b"T: v\r\n", b"Authorization: Bearer BOB\r\n", b"T : v\r\n", b"T: v\n", b"Content-Length: 3\r\n", b" x\r\n")
_BETWEEN = (
    b"\r\n",
    b"\n",
    b"\r",
    b"POST ",
    b"P",
    b"hi",
    b"X: ",
    b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
    b"OST /v1/c HTTP/1.1\r\n",
    b" ",
)
_INSERTED = b'\r\n :0a\x00\t";'


def _line(random: Random) -> bytes:
    if random.random() < 0.7:
        return b"POST %b HTTP/1.1\r\n" % choose(random, _PATHS)
    space = b" " if random.random() < 0.9 else choose(random, (b"  ", b"\t", b""))
    target = choose(random, _PATHS if random.random() < 0.6 else _TARGETS)
    end = b"\r\n" if random.random() < 0.95 else choose(random, (b"\n", b" \r\n", b"\r", b"\r\r\n"))
    return choose(random, _METHODS) + space + target + (b" " if random.random() < 0.95 else b"  ") + choose(random, _VERSIONS) + end


def _chunked(random: Random, body: bytes) -> bytes:
    out, at = [], 0
    while at < len(body):
        size = 1 + int(random.random() * (len(body) - at))
        form = b"%x" if random.random() < 0.8 else choose(random, _SIZES)
        out.append(form % size + b"\r\n" + body[at : at + size] + b"\r\n")
        at += size
    last = b"0" if random.random() < 0.95 else choose(random, (b"00", b"0;e", b"-0", b""))
    return b"".join((*out, last, b"\r\n", choose(random, _TRAILERS), b"\r\n"))


def request(random: Random) -> bytes:
    """Return a request, valid or odd."""
    body, lines = choose(random, _BODIES), []
    if random.random() < 0.92:
        lines.append(b"Host: " + (b"h" if random.random() < 0.9 else choose(random, _NAMED_HOSTS)))
    if random.random() < 0.7:
        lines.append(choose(random, _AUTHORIZATION) + b": " + choose(random, _KEYS[:3] if random.random() < 0.85 else _KEYS))
    kind, is_chunked = random.random(), False
    if kind < 0.65:
        digits = b"%d" % (len(body) if random.random() < 0.95 else int(random.random() * 60))
        lines.append(choose(random, _LENGTH) + b": " + (digits if random.random() < 0.95 else choose(random, _LENGTHS)(digits)))
    elif kind < 0.85:
        lines.append(b"Transfer-Encoding: " + choose(random, _ENCODINGS))
        is_chunked = True
    if random.random() < 0.08:
        lines.append(b"Connection: " + choose(random, _CONNECTIONS))
    while random.random() < 0.15:
        lines.append(choose(random, _ODD))
    if random.random() < 0.3:
        random.shuffle(lines)
    head = b"\r\n".join([*lines, b""])
    if random.random() < 0.02:
        head = head.replace(b"\r\n", b"\n", 1)
    return _line(random) + head + b"\r\n" + (_chunked(random, body) if is_chunked else body)


def _pieces(random: Random) -> list[bytes]:
    """Return requests and parts of them, which are then read in any order, some of them several times."""
    pieces = [request(random) for _ in range(1 + int(random.random() * 3))]
    for _ in range(int(random.random() * 4)):
        cut_one = choose(random, pieces)
        indexes = [at for at in range(len(cut_one)) if cut_one[at] in b" \r\n:"] or [0]
        at = choose(random, indexes) + int(random.random() * 3)
        pieces += [cut_one[:at], cut_one[at:]]
    if random.random() < 0.3:
        pieces.append(choose(random, _BETWEEN))
    if random.random() < 0.3:
        pieces.append(mutated(random, choose(random, pieces), _INSERTED))
    return pieces


def _ending(random: Random) -> bytes:
    body = choose(random, (b"hi", b"", b"{}x"))
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def _key(random: Random) -> bytes:
    return b"Authorization: Bearer " + choose(random, (b"ALICE", b"BOB")) + b"\r\n"


_HOST, _HEADER = b"Host: h\r\n", b"X: "
_REPEATED: tuple[Callable[[Random], bytes], ...] = (
    lambda random: _CHAT + _key(random) + _HOST + _HEADER,
    lambda random: _CHAT + _ending(random),
    lambda random: _CHAT + _HOST + _ending(random),
    lambda random: _CHAT + _key(random) + _HOST + _ending(random),
    lambda random: _CHAT + _HOST + _key(random) + _ending(random),
    lambda random: _HEADER,
    _key,
    lambda random: _CHAT + _HOST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n" + choose(random, (b"\r\n", _HEADER)),
    lambda random: _CHAT,
    lambda random: b"\r\n",
    lambda random: _CHAT + _HOST + b"Content-Length: %d\r\n\r\n" % len(_CHAT),
    lambda random: _CHAT + _key(random) + _HOST + b"Content-Length: 2\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nhi",
)
"""Reads that start with the same line. As parts of another request they are a header's value or a body."""


def _repeated(random: Random) -> list[bytes]:
    pieces = [choose(random, _REPEATED)(random) for _ in range(2 + int(random.random() * 3))]
    if random.random() < 0.2:
        cut_one = choose(random, pieces)
        pieces.append(cut_one[: int(random.random() * (len(cut_one) + 1))])
    return pieces


def _valid(random: Random) -> bytes:
    """Return a request that every rule accepts, and that does not end its connection."""
    body, length = choose(random, _BODIES), True
    lines = [b"Host: h\r\n", _key(random)]
    if random.random() < 0.3:
        length = False
        lines.append(b"Transfer-Encoding: chunked\r\n")
    else:
        lines.append(b"Content-Length: %d\r\n" % len(body))
    if random.random() < 0.3:
        lines.append(
            choose(
                random,
                (
                    b"X: POST /v1/c HTTP/1.1\r\n",
                    b"Expect: 100-continue\r\n",
                    b"X:\r\n",
                    b"X: a\xff \t\r\n",
                    b"X-Forwarded-For: 1.2.3.4\r\n",
                ),
            )
        )
    random.shuffle(lines)
    sizes = [] if length or not body else [b"%x\r\n%b\r\n" % (len(body), body)]
    return _CHAT + b"".join(lines) + b"\r\n" + (body if length else b"".join((*sizes, b"0\r\n\r\n")))


def case(random: Random) -> None:
    """Compare one sequence of requests."""
    kind = random.random()
    if kind < 0.2:
        reads = [_valid(random) for _ in range(1 + int(random.random() * 4))]
        compare(random, reads, len(reads))
        return
    pieces = _repeated(random) if kind < 0.55 else _pieces(random)
    reads = [piece for piece in (choose(random, pieces) for _ in range(2 + int(random.random() * 5))) if piece]
    if reads:
        compare(random, reads)


@contextmanager
def opened() -> Iterator[Case]:
    """Provide ``case``."""
    yield case
