"""The request line and headers of one HTTP/1.1 request (RFC 9112), from their bytes. Pure.

The grammar is llhttp's (httptools); this module owns the additional requirements of a gateway. The rules: the result depends on the given
bytes alone, because each head is read by a new parser. Bytes that two parsers could read in two ways are rejected: the request line has
single spaces, each line is one header, the headers that decide framing or identity come once, the only transfer encoding is ``chunked``,
and ``Host`` is one valid host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Any

import httptools
import msgspec

from gateway.api.errors import Refusal
from upstream.http.response_head import trimmed

MAX_HEAD = 64 * 1024
"""Bytes of a request line with its headers."""
MAX_HEADERS = 100
FORWARDED = b"x-forwarded-for"
_CONNECT = b"CONNECT"
_ONCE = frozenset({b"authorization", b"x-api-key", b"content-type", b"content-length", b"content-encoding", b"host", b"transfer-encoding"})
_HOST = re.compile(rb"(?:\[([^]]*)\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}){1,255})(?::[0-9]{0,5})?", re.ASCII)
"""RFC 3986, section 3.2.2, with the length that names have (RFC 1035), and not empty (RFC 9110, section 4.2.1)."""
_LINE = re.compile(rb"[!-~]+ [!-~]+ HTTP/1\.[01]\r\n")
_IN_LINE = bytes(range(0x20, 0x7F))
_VERSIONS = {"1.0": True, "1.1": False}  # whether the version is HTTP/1.0


class RequestHead(msgspec.Struct, frozen=True, eq=False):
    """The request line and headers of one request."""

    method: bytes
    url: bytes
    """The request target, which is checked by the server: a path, perhaps with a query."""
    headers: Mapping[bytes, bytes]
    """By lower-case name.

    A header that was sent more than once has its last value; ``x-forwarded-for`` has all values, joined by commas.
    """
    fields: Sequence[tuple[bytes, bytes]]
    """All header lines in their order, with lower-case names."""
    http10: bool
    content_length: int | None
    """The bytes of the body; None if the request has none, or if it is chunked."""
    chunked: bool
    keep_alive: bool
    """The client expects further requests on the connection."""

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends the body (RFC 9110, section 10.1.1)."""
        return not self.http10 and self.headers.get(b"expect", b"").lower() == b"100-continue"


class _HeadEvents:
    """Receives llhttp's callbacks for one head."""

    __slots__ = ("headers", "http10", "keep_alive", "method", "on_header", "parser", "upgrades", "url")

    def __init__(self) -> None:
        self.method = self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.on_header = self.headers.setdefault  # a method here would take six times as long
        self.http10: bool | None = None
        self.keep_alive = self.upgrades = False
        self.parser: Any = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_headers_complete(self) -> None:
        parser = self.parser
        self.method, self.http10 = parser.get_method(), _VERSIONS.get(parser.get_http_version())
        self.keep_alive, self.upgrades = parser.should_keep_alive(), parser.should_upgrade()


def parse_head(data: bytes) -> RequestHead:
    """Parse a request line and headers, up to their first empty line. Raises Refusal."""
    if len(data) > MAX_HEAD:
        check_start(data[:MAX_HEAD])
        raise head_too_large()
    events = _HeadEvents()
    try:
        events.parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # the offer of another protocol, which is not accepted: the request is an ordinary one (RFC 9110, section 7.8)
    except httptools.HttpParserError:
        raise invalid_request() from None
    finally:
        events.parser = None  # which refers to the events
    method, url, http10 = events.method, events.url, events.http10
    # llhttp accepts several spaces in the request line, and other protocols.
    if http10 is None or not data.startswith(b"%b %b HTTP/1.%d\r\n" % (method, url, not http10)):
        raise invalid_request()
    number = data.count(b"\r\n") - 2  # of headers: each is one line
    if data.count(b"\n") != number + 2:
        raise invalid_request()  # llhttp accepts a bare line feed in some places, where it may see the end of the headers
    if number > MAX_HEADERS:
        raise head_too_large()
    headers = trimmed({name.lower(): value for name, value in events.headers.items()}, data)
    fields = list(headers.items())
    if len(headers) < number:
        fields = _all_fields(data)
        headers = _by_name(fields)
    if b"transfer-encoding" in headers and (http10 or headers[b"transfer-encoding"].lower() != b"chunked"):
        raise Refusal("invalid_request", "The only supported transfer encoding is 'chunked', in HTTP/1.1.")
    host = headers.get(b"host")
    if not http10 if host is None else not is_host(host):
        # The gateway does not use it, but a proxy in front of it may (RFC 9112, section 3.2).
        raise Refusal("invalid_request", "The header 'host' is missing or no valid host.")
    length, chunked = headers.get(b"content-length"), b"transfer-encoding" in headers
    keep_alive = events.keep_alive
    if method == _CONNECT:
        length, chunked, keep_alive = None, False, False  # what follows is of no protocol that the gateway speaks
    elif events.upgrades and length is None and not chunked:
        keep_alive = False  # what follows may be of the offered protocol
    return RequestHead(method, url, headers, fields, http10, None if length is None else int(length), chunked, keep_alive)


def check_start(data: bytes | bytearray) -> None:
    """Check the first bytes of a request before its headers are complete. Raises Refusal for those that ``parse_head`` rejects anyway.

    The client of another protocol gets its response at once. Otherwise it would wait for the timeout.
    """
    end = data.find(b"\n") + 1
    if _LINE.fullmatch(data, 0, end) is None if end else data.rstrip(b"\r").translate(None, _IN_LINE):
        raise invalid_request()


def with_length(head: RequestHead, digits: bytes) -> RequestHead:
    """Return the same request line and headers with another Content-Length."""
    name = b"content-length"
    fields = [(each, digits if each == name else value) for each, value in head.fields]
    headers = {**head.headers, name: digits}
    length = None if head.content_length is None else int(digits)  # without one, the header does not frame a body: CONNECT
    return RequestHead(head.method, head.url, headers, fields, head.http10, length, head.chunked, head.keep_alive)


def is_host(value: bytes) -> bool:
    """Return whether the value of a Host header is one host: a name, or an address as in a URL, perhaps with a port."""
    found = _HOST.fullmatch(value)
    return found is not None and (found[1] is None or _is_ipv6(found[1]))


def _is_ipv6(text: bytes) -> bool:
    if b"%" in text:
        return False  # a zone, which other readers treat as an escape
    try:
        IPv6Address(text.decode("latin-1"))
    except ValueError:
        return False
    return True


class _FieldEvents:
    """Receives the headers of one head, repeated ones included."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.rstrip(b" \t")))


def _all_fields(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return all headers of a valid head, in their order."""
    events = _FieldEvents()
    with suppress(httptools.HttpParserUpgrade):
        httptools.HttpRequestParser(events).feed_data(data)
    return events.fields


def _by_name(fields: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return repeated headers by name. Raises Refusal if one of ``_ONCE`` is repeated."""
    seen: set[bytes] = set()
    for name, _ in fields:
        if name in seen and name in _ONCE:
            raise Refusal("invalid_request", f"The header '{name.decode('latin-1')}' was sent more than once.")
        seen.add(name)
    headers = dict(fields)
    if FORWARDED in headers:
        headers[FORWARDED] = b",".join(value for name, value in fields if name == FORWARDED)  # one list (RFC 9110, section 5.3)
    return headers


def invalid_request() -> Refusal:
    """Return the refusal of bytes that are not a request."""
    return Refusal("invalid_request", "The request is not valid HTTP/1.1.")


def head_too_large() -> Refusal:
    """Return the refusal of a request whose request line and headers, or whose trailers, are too large."""
    return Refusal("headers_too_large", f"The head of the request is larger than {MAX_HEAD} bytes or has more than {MAX_HEADERS} headers.")
