"""Responses on reused connections, in any reads: the gateway's connection to a server against llhttp and h11."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from tests.fuzz.differential.cases import Case, check, choose, cut, has_empty_extension, mutated, single_bytes
from tests.fuzz.differential.references import Message, Reading, h11_response, llhttp_response
from tests.support.exchange import ManualWriteBatch
from tests.support.way import Wire
from upstream.http.connection import Connection
from upstream.http.errors import UpstreamError
from upstream.http.response_head import Headers

_BY_BYTES = 1 / 8
"""The share of cases that are also read byte by byte."""
_BY_H11 = 1 / 8
"""The share of cases that h11 reads as well; every refused response is read by h11 too."""


class _Response(NamedTuple):
    """One response as its receiver got it. ``end``: ``complete``, ``failed``, or empty. ``reusable``: another request may be sent."""

    status: int | None
    headers: Headers | None
    body: bytes
    end: str
    reusable: bool


class _Receiver:
    """Receives one response, and checks the order of the calls."""

    wants_read_events = True

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: Headers | None = None
        self.pieces: list[bytes] = []
        self.end = ""

    def on_headers(self, status: int, headers: Headers) -> None:
        check(not self.end and self.status is None, "one final status", status)
        self.status, self.headers = status, dict(headers)

    def on_body(self, data: bytes) -> None:
        check(not self.end and self.status is not None, "a body is inside of its response", data)
        self.pieces.append(bytes(data))

    def on_read(self) -> None:
        check(not self.end, "nothing behind the end")

    def on_end(self) -> None:
        check(not self.end and self.status is not None, "one end, behind a status")
        self.end = "complete"

    def on_failure(self, error: UpstreamError) -> None:
        check(not self.end, "one end", error)
        self.end = "failed"

    def on_writable(self) -> None:
        """Do nothing: the request is sent at once."""


def _receive(exchanges: Sequence[Iterable[bytes]], *, closed: bool) -> list[_Response]:
    """Return what the receivers of one connection get. Each exchange is one request and the reads behind it."""
    idle: list[Connection] = []
    wire = Wire()
    connection = Connection("server", idle.append, ManualWriteBatch(math.inf))
    wire.set_protocol(connection)
    connection.connection_made(wire)
    responses = []
    for reads in exchanges:
        receiver = _Receiver()
        idle.clear()
        connection.send(b"x", receiver)
        wire.written.clear()
        for read in reads:
            if wire.is_closing():
                break
            wire.receive(read)
        if closed and not receiver.end and not wire.is_closing():
            connection.connection_lost(None)
        reusable = bool(idle) and not connection.closed
        # The headers of an error are not used, apart from those that all have.
        responses.append(_Response(receiver.status, receiver.headers, b"".join(receiver.pieces), receiver.end, reusable))
        if not reusable:
            break
    if not connection.closed:
        wire.close()
        connection.connection_lost(None)
    return responses


def compare(random: Random, exchanges: Sequence[bytes], *, closed: bool, valid: int = 0) -> None:
    """Compare what is received in one read for each exchange, in other reads, and what the references read.

    ``closed``: the server closes the connection behind the last exchange. ``valid``: how many exchanges at the start are valid.
    """
    whole = _receive([[data] for data in exchanges], closed=closed)
    others = [[cut(random, data) for data in exchanges]]
    if random.random() < _BY_BYTES:
        others.append([single_bytes(data) for data in exchanges])
    readings = [_read(data, closed, response, by_h11=random.random() < _BY_H11) for data, response in zip(exchanges, whole, strict=False)]
    for other in others:
        results = _receive(other, closed=closed)
        same = [_seen(response, data, reading) for response, data, reading in zip(results, exchanges, readings, strict=False)]
        expected = [_seen(response, data, reading) for response, data, reading in zip(whole, exchanges, readings, strict=False)]
        check(same == expected, "the reads change what is received", other, results, exchanges, whole)
    check(sum(response.end == "complete" for response in whole) >= valid, "a valid response is received", exchanges, whole)
    for response, data, reading in zip(whole, exchanges, readings, strict=False):
        _check(response, data, reading, closed=closed)


class _Readings(NamedTuple):
    llhttp: Reading
    h11: Reading | None

    @property
    def messages(self) -> list[Message]:
        return [reading.message for reading in self if reading is not None and reading.message is not None]


def _read(data: bytes, closed: bool, response: _Response, *, by_h11: bool) -> _Readings:
    first = llhttp_response(data, 0, closed=closed)
    needs_second = by_h11 or response.end == "failed" or first.message is None
    return _Readings(first, h11_response(data, 0, closed=closed) if needs_second else None)


def _has_excess(data: bytes, readings: _Readings) -> bool:
    """Return whether bytes follow the end of the response: it may be received or refused, and nothing may be sent after it."""
    return any(message.end is not None and message.end < len(data) for message in readings.messages)


def _seen(response: _Response, data: bytes, readings: _Readings) -> tuple[object, ...]:
    """Return what must not depend on the reads."""
    if response.end == "failed":  # when a bad response is refused may depend on them, and what is received before has no meaning
        return response.end if not _has_excess(data, readings) else "", response.reusable
    return response if not _has_excess(data, readings) else ("", response.reusable)


def _check(response: _Response, data: bytes, readings: _Readings, *, closed: bool) -> None:
    """Compare a response with what the references read."""
    messages = readings.messages
    if _has_excess(data, readings):
        check(not response.reusable, "nothing is sent behind bytes that no request has", data, response)
    if response.end == "failed":
        _check_refusal(response, data, readings, closed=closed)
        return
    if response.status is None:
        check(
            any(message.end is None for message in messages) or not messages or readings.h11 is None or _is_stricter(data),
            "a response that both references accept is not waited for",
            data,
            response,
        )
        return
    check(messages, "a response that no reference accepts", data, response)
    for message in messages:
        check(message.first == (response.status,), "a reference reads another status", data, response, message)
        check(_by_name(message) == _lower(response.headers or {}), "a reference reads other headers", data, response, message)
        check(response.body == message.body, "a reference reads another body", data, response, message)
        check((response.end == "complete") == (message.end is not None), "a reference has another end", data, response, message)
        if response.reusable and message.version == "1.1":
            check(message.keep_alive, "a connection that a reference closes", data, response, message)


def _lower(headers: Headers) -> Headers:
    lower: dict[bytes, bytes] = {}
    for name, value in headers.items():
        value = value.rstrip(b" \t")
        lower.setdefault(name.lower(), value.lower() if name.lower() == b"transfer-encoding" else value)
    return lower


def _by_name(message: Message) -> Headers:
    """Return the first value of each header. h11 reports a transfer encoding in lower case."""
    headers: dict[bytes, bytes] = {}
    for name, value in message.fields:
        headers.setdefault(name, value.lower() if name == b"transfer-encoding" else value)
    return headers


def _check_refusal(response: _Response, data: bytes, readings: _Readings, *, closed: bool) -> None:
    """Check that a response is refused for a reason: a reference, a rule of the gateway, or its missing end."""
    if _has_excess(data, readings) or (closed and any(message.end is None for message in readings.messages)):
        return
    if readings.llhttp.refused or readings.h11 is None or readings.h11.refused or len(readings.messages) < 2:
        return
    first, second = readings.messages
    if first.end is None or second.end is None or data.startswith(b"HTTP/1.0 1"):  # HTTP/1.0 has no interim responses
        return
    is_stricter = _is_refused(first) or _is_stricter(data)
    check(first[:2] != second[:2] or is_stricter, "a response is refused that both references accept", data, response, first)


def _is_stricter(data: bytes) -> bool:
    """Return whether the bytes may have a bare line end, or an empty chunk extension. The gateway accepts neither."""
    lines = data.replace(b"\r\n", b"")
    return b"\n" in lines or b"\r" in lines or has_empty_extension(data)


def _is_refused(message: Message) -> bool:
    """Return whether a stricter rule of the gateway refuses a response."""
    encodings = [value.lower() for name, value in message.fields if name == b"transfer-encoding"]
    return message.version not in ("1.0", "1.1") or any(value != b"chunked" for value in encodings)


# Generated responses

_STATUSES = (*[200] * 9, 201, 204, 304, 400, 429, 500, 503)
_BODIES = (b"", b"hi", b"hi", b"{}", b"x" * 40, b"HTTP/1.1 200 OK\r\n\r\n", b"\n\n\r\n", b"a\n\n", b"0\r\n\r\n")
_VERSIONS = (*[b"HTTP/1.1"] * 14, b"HTTP/1.0", b"HTTP/2.0", b"ICE/1.1", b"RTSP/1.0", b"http/1.1")
_ODD = (
    b" folded",
    b"bad name: x",
    b": x",
    b"no-colon",
    b"x: a\x00b",
    b"x: a\rb",
    b"x: a\nb: c",
    b"x: \xff",
    b"X : y",
    b"Content-Type: application/json",
    b"content-type: text/plain",
    b"content-length: 2",
    b"transfer-encoding: chunked",
    b"connection: close",
    b"connection: keep-alive",
    b"connection: upgrade",
    b"upgrade: h2c",
    b"x: HTTP/1.1 200 OK",
    b"x:",
)
_LENGTHS = (b"0%d", b"+%d", b"-%d", b"%d ", b"\t%d", b"%d, 2", b"1%d%%" + b"9" * 20, b"0x%d")
_ENCODINGS = (*[b"chunked"] * 12, b"Chunked", b"gzip, chunked", b"chunked, chunked", b"identity", b"chunked ")
_SIZES = (*[b"%x"] * 12, b"%X", b"0%x", b"%x;e=1", b'%x;e="a"', b"%x ", b"0x%x", b"%x\n", b"fffffffffffffffff%x")
_TRAILERS = (*[b""] * 6, b"t: v\r\n", b"content-length: 3\r\n", b"t : v\r\n", b"t: v\n")
_INTERIM = (
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 102 Processing\r\ntransfer-encoding: chunked\r\n\r\n",
)
_EXCESS = (b"\r\n", b"x", b"\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
_LENGTH = re.compile(rb"(content-length: *)[0-9]+", re.IGNORECASE)
_INSERTED = b"\r\n :0a\x00;"


def _chunked(random: Random, body: bytes) -> bytes:
    out, at = [], 0
    while at < len(body):
        size = 1 + int(random.random() * (len(body) - at))
        out.append((b"%x" if random.random() < 0.85 else choose(random, _SIZES)) % size + b"\r\n" + body[at : at + size] + b"\r\n")
        at += size
    return b"".join((*out, b"0\r\n", choose(random, _TRAILERS), b"\r\n"))


def response(random: Random) -> bytes:
    """Return a response, valid or odd."""
    body, lines, kind = choose(random, _BODIES), [], random.random()
    status = choose(random, _STATUSES)
    is_chunked = 0.65 < kind < 0.92
    if kind < 0.65:
        length = len(body) if random.random() < 0.96 else int(random.random() * 50)
        lines.append(b"content-length: " + (b"%d" if random.random() < 0.96 else choose(random, _LENGTHS)) % length)
    elif is_chunked:
        lines.append(b"transfer-encoding: " + choose(random, _ENCODINGS))
    if random.random() < 0.85:
        lines.append(b"content-type: application/json")
    if random.random() < 0.3:
        lines.append(b"date: " + choose(random, (b"A", b"B")))
    while random.random() < 0.12:
        lines.append(choose(random, _ODD))
    if random.random() < 0.3:
        random.shuffle(lines)
    if random.random() < 0.1:
        lines = [line.title() for line in lines]
    first = b"%b %d OK\r\n" % (b"HTTP/1.1" if random.random() < 0.8 else choose(random, _VERSIONS), status)
    head = b"".join((first, *(line + b"\r\n" for line in lines), b"\r\n"))
    framed = _chunked(random, body) if is_chunked else b"" if status in (204, 304) and random.random() < 0.8 else body
    if random.random() < 0.12:
        # an interim response has no body, whatever its length says
        early = b"HTTP/1.1 103 Early\r\ncontent-length: %d\r\ncontent-type: a\r\n\r\n" % len(head + framed)
        head = (early if random.random() < 0.3 else choose(random, _INTERIM)) + head
    return head + framed


def _with_other_length(random: Random, data: bytes) -> bytes:
    """Return a response whose headers differ only in the digits of their length, perhaps with a body of that length."""
    head, end, body = data.partition(b"\r\n\r\n")
    body = choose(random, (*_BODIES, body))
    digits = b"%d" % len(body) if random.random() < 0.8 else choose(random, (b"", b"00", b"1x", b"1 ", b"9" * 16))
    return _LENGTH.sub(lambda found: found[1] + digits, head, count=1) + end + body


def _valid(random: Random) -> bytes:
    """Return a response that every rule accepts, and that does not end its connection."""
    body = choose(random, _BODIES)
    lines = [b"content-type: application/json\r\n", b"date: %b\r\n" % choose(random, (b"A", b"B"))]
    if random.random() < 0.6:
        lines.append(b"content-length: %d\r\n" % len(body))
    else:
        lines.append(b"transfer-encoding: chunked\r\n")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    random.shuffle(lines)
    return b"".join((b"HTTP/1.1 %d OK\r\n" % choose(random, (200, 200, 400, 500)), *lines, b"\r\n", body))


def case(random: Random) -> None:
    """Compare one sequence of exchanges."""
    closed = random.random() < 0.5
    if random.random() < 0.2:
        exchanges = [_valid(random) for _ in range(1 + int(random.random() * 4))]
        compare(random, exchanges, closed=closed, valid=len(exchanges))
        return
    known = [response(random) for _ in range(1 + int(random.random() * 2))]
    if random.random() < 0.3:
        known.append(mutated(random, choose(random, known), _INSERTED))
    if random.random() < 0.2:
        known.append(_with_other_length(random, choose(random, known)))
    if random.random() < 0.1:
        known.append(choose(random, known) + choose(random, [*known, *_EXCESS]))
    exchanges = [data for data in (choose(random, known) for _ in range(1 + int(random.random() * 5))) if data]
    if exchanges:
        compare(random, exchanges, closed=closed)


@contextmanager
def opened() -> Iterator[Case]:
    """Provide ``case``."""
    yield case
