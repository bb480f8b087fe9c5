"""The status line and headers of one HTTP/1.1 response (RFC 9112), from their bytes. Pure.

The grammar is llhttp's (httptools) in its strict mode. The rule: the result depends on the given bytes alone, because each head is read by
a new parser. It decides how the body is framed (RFC 9112, section 6.3).
"""

from __future__ import annotations

from typing import Any

import httptools
import msgspec

Headers = dict[bytes, bytes]
"""The headers of a response by lower-case name; if a header is repeated, the first value."""

_VERSIONS = (b"HTTP/1.1 ", b"HTTP/1.0 ")
_WITHOUT_A_BODY = frozenset({204, 304})


class ResponseHeadError(ValueError):
    """The bytes are not the status line and headers of a response."""


class ResponseHead(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The status line and headers of one response."""

    status: int
    headers: Headers
    length: int | None
    """The bytes of the body; None if it is chunked, or ends with the connection."""
    chunked: bool
    keep_alive: bool
    """The server expects further requests on the connection."""


def may_begin_response(data: bytes | bytearray) -> bool:
    """Return whether a response may begin with these bytes."""
    start = bytes(data[: len(_VERSIONS[0])])
    return any(version.startswith(start) for version in _VERSIONS)


class _HeadEvents:
    """Receives llhttp's callbacks for one head."""

    __slots__ = ("complete", "headers", "keep_alive", "on_header", "parser")

    def __init__(self) -> None:
        self.headers: Headers = {}
        self.on_header = self.headers.setdefault  # a method here would take six times as long
        self.complete = self.keep_alive = False
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.complete, self.keep_alive = True, self.parser.should_keep_alive()


def _is_repeated(data: bytes, name: bytes) -> bool:
    """Return whether a valid head has several headers of this name."""
    return sum(line[: line.find(b":")].lower() == name for line in data.split(b"\r\n")) > 1


def parse_response_head(data: bytes) -> ResponseHead:
    """Parse a status line and headers, up to their first empty line. Raises ResponseHeadError."""
    events = _HeadEvents()
    parser = events.parser
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise ResponseHeadError(f"not HTTP/1.1: {error}") from None
    finally:
        events.parser = None  # which refers to the events
    # llhttp accepts a bare line feed in some places, where it may see the end of the headers.
    lines = data.count(b"\r\n")
    if not (events.complete and data.startswith(_VERSIONS) and data.count(b"\n") == lines):
        raise ResponseHeadError("not HTTP/1.1")
    status, headers = parser.get_status_code(), events.headers
    if not b"".join(headers).islower():
        headers = {}
        for name, value in events.headers.items():
            headers.setdefault(name.lower(), value)
    if data.find(b" \r\n") >= 0 or data.find(b"\t\r\n") >= 0:  # white space behind a value (RFC 9110, section 5.5)
        headers = {name: value.rstrip(b" \t") for name, value in headers.items()}
    if len(headers) + 2 < lines and _is_repeated(data, b"transfer-encoding"):
        raise ResponseHeadError("its transfer encoding is not 'chunked' alone")
    encoding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
    if encoding is not None and encoding.lower() != b"chunked":
        raise ResponseHeadError("its transfer encoding is not 'chunked' alone")
    if status in _WITHOUT_A_BODY:
        return ResponseHead(status, headers, 0, False, events.keep_alive)
    return ResponseHead(status, headers, None if length is None else int(length), encoding is not None, events.keep_alive)
