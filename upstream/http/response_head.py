"""The status line and headers of one HTTP/1.1 response (RFC 9112), from their bytes. Pure.

The grammar is llhttp's (httptools) in its strict mode. The rule: the result depends on the given bytes alone, because each head is read by
a new parser. It decides how the body is framed (RFC 9112, section 6.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import httptools
import msgspec

Headers = Mapping[bytes, bytes]
"""The headers of a response by lower-case name; if a header is repeated, the first value."""

_HTTP_11 = b"HTTP/1.1 "
_VERSIONS = (_HTTP_11, b"HTTP/1.0 ")
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
    start = bytes(data[: len(_HTTP_11)])
    return any(version.startswith(start) for version in _VERSIONS)


def trimmed(headers: dict[bytes, bytes], data: bytes) -> dict[bytes, bytes]:
    """Return the headers of these bytes without white space after their values (RFC 9110, section 5.5)."""
    if data.find(b" \r\n") < 0 and data.find(b"\t\r\n") < 0:
        return headers
    return {name: value.rstrip(b" \t") for name, value in headers.items()}


def _all_values(data: bytes, name: bytes) -> list[bytes]:
    """Return the values of all headers with this name in valid bytes: each line is one header."""
    fields = (line.partition(b":") for line in data.split(b"\r\n"))
    return [value for given, _, value in fields if given.lower() == name]


def with_length(head: ResponseHead, digits: bytes) -> ResponseHead:
    """Return the same status and headers with another Content-Length."""
    length = 0 if head.status in _WITHOUT_A_BODY else int(digits)
    return ResponseHead(head.status, {**head.headers, b"content-length": digits}, length, head.chunked, head.keep_alive)


def parse_response_head(data: bytes) -> ResponseHead:
    """Parse a status line and headers, up to their first empty line. Raises ResponseHeadError."""
    headers: dict[bytes, bytes] = {}
    parser = httptools.HttpResponseParser(SimpleNamespace(on_header=headers.setdefault))  # a function here would take six times as long
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise ResponseHeadError(f"not HTTP/1.1: {error}") from None
    # llhttp accepts a bare line feed in some places, where it may see the end of the headers.
    version, lines = data[: len(_HTTP_11)], data.count(b"\r\n")
    if version not in _VERSIONS or data.count(b"\n") != lines or data[-4:] != b"\r\n\r\n":
        raise ResponseHeadError("not HTTP/1.1")
    if not b"".join(headers).islower():
        mixed, headers = headers, {}
        for name, value in mixed.items():
            headers.setdefault(name.lower(), value)
    headers = trimmed(headers, data)
    is_repeated = len(headers) + 2 < lines
    if is_repeated and len(_all_values(data, b"transfer-encoding")) > 1:
        raise ResponseHeadError("its transfer encoding is not 'chunked' alone")
    encoding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
    if encoding is not None and encoding.lower() != b"chunked":
        raise ResponseHeadError("its transfer encoding is not 'chunked' alone")
    keep_alive = version == _HTTP_11
    if b"connection" in headers:
        values = b",".join(_all_values(data, b"connection")).lower()
        options = [option.strip(b" \t") for option in values.split(b",")]
        keep_alive = b"close" not in options and (keep_alive or b"keep-alive" in options)
    status = parser.get_status_code()
    if status in _WITHOUT_A_BODY:
        return ResponseHead(status, headers, 0, False, keep_alive)
    if length is None:
        return ResponseHead(status, headers, None, encoding is not None, keep_alive and encoding is not None)
    return ResponseHead(status, headers, int(length), False, keep_alive)
