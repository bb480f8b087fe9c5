"""HTTP/1.1 requests from bytes (RFC 9112), without I/O: bytes go in, the parts of requests come out.

The grammar is llhttp's (httptools); this module owns the additional requirements of a gateway. The rule: bytes that two parsers could read
in two ways are rejected. So a request line has single spaces, the headers that decide framing or identity come once, the only transfer
encoding is ``chunked``, and ``Host`` is one valid host. The request line, headers and trailers, and the framing of chunks, are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from ipaddress import IPv6Address
from typing import Any, NamedTuple, Protocol

import httptools
import msgspec

from gateway.api.errors import Refusal

MAX_HEAD = 64 * 1024
"""Bytes of a request line with its headers."""
MAX_HEADERS = 100
FORWARDED = b"x-forwarded-for"
_FRAMING_PER_BYTE = 8
"""Allowed framing bytes for each byte of a body: a chunk of one byte has five. Longer framing, with extensions, counts towards MAX_HEAD."""
_VERSION, _HEAD_END = b" HTTP/1.", b"\r\n\r\n"
_CONNECT = b"CONNECT"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)
_AUTHORIZATION = re.compile(rb"\r\nauthorization:[ \t]*([!-~]+ [!-~]+)[ \t]*\r\n", re.IGNORECASE)
_VISIBLE, _SPACE = bytes(range(0x21, 0x7F)), ord(" ")
_MAX_REPEATABLE = 4096  # bytes of a request line and headers that are remembered
_MAX_DIGITS = 15  # of a Content-Length in a repeated request: httptools checks longer ones
_FRAMING = (b"content-length", b"transfer-encoding")
_ONCE = frozenset({b"authorization", b"x-api-key", b"content-type", b"content-length", b"content-encoding", b"host", b"transfer-encoding"})
_HOST = re.compile(rb"(?:\[([^]]*)\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}){1,255})(?::[0-9]{0,5})?", re.ASCII)
"""RFC 3986, section 3.2.2, with the length that names have (RFC 1035), and not empty (RFC 9110, section 4.2.1)."""
_COMMON = b"""host user-agent accept accept-encoding accept-language connection content-type content-length content-encoding
transfer-encoding authorization x-api-key x-request-id x-forwarded-for traceparent anthropic-version expect origin""".split()
_NAMES = {spelled: name for name in _COMMON for spelled in (name, name.title())}
"""Common header names in lower case, as clients spell them. Requests share these, which saves memory for each open stream."""
_NEVER = b"\n"  # no header value and no request line contains it


class RequestHead(msgspec.Struct, frozen=True, eq=False):
    """The request line and headers of one request."""

    method: bytes
    url: bytes
    """The request target, which is checked by the server: a path, perhaps with a query."""
    headers: dict[bytes, bytes]
    """By lower-case name.

    A header that was sent more than once has its last value; ``x-forwarded-for`` has all values, joined by commas.
    """
    fields: Sequence[tuple[bytes, bytes]]
    """All header lines in their order, with lower-case names."""
    http10: bool
    content_length: int | None
    keep_alive: bool
    """The client expects further requests on the connection."""

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends the body (RFC 9110, section 10.1.1)."""
        return not self.http10 and self.headers.get(b"expect", b"").lower() == b"100-continue"


class BodyReceiver(Protocol):
    """Receives the body of one request."""

    size: int
    """Bytes received."""

    is_awaited: bool
    """The request is served as soon as the body has been received."""

    def feed(self, data: bytes) -> None:
        """Receive the next bytes."""

    def finish(self) -> None:
        """Note that all of the body has been received."""

    def fail(self, refusal: Refusal) -> None:
        """Note that the rest of the body will not be received."""


class RequestHandler(Protocol):
    """Receives the requests of one connection, in their order."""

    def request_received(self, head: RequestHead) -> BodyReceiver:
        """Begin a request. Returns the receiver of its body. Raises Refusal; parsing stops then."""

    def upgrade_offered(self, head: RequestHead, rest: bytes) -> bool:
        """Return whether the handler switches to the offered protocol, whose first bytes are ``rest``.

        If so, nothing more is parsed. If not, the request is an ordinary one (RFC 9110, section 7.8), and ``rest`` is its body.
        """


class Reading(Enum):
    """The next bytes that a parser expects."""

    FIRST_REQUEST = auto()
    """No byte of a request has been received yet."""
    HEAD = auto()
    """The rest of a request line and headers."""
    BODY = auto()
    """The rest of a body."""
    NEXT_REQUEST = auto()
    """The connection is between two requests."""
    NOTHING = auto()
    """Nothing is parsed any more."""


# Module names of our own: looking up an enum's member costs a call with CPython 3.11.
_HEAD, _BODY, _NEXT_REQUEST, _NOTHING = Reading.HEAD, Reading.BODY, Reading.NEXT_REQUEST, Reading.NOTHING


class HttpParser:
    """Parses the requests of one connection."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._parser = self._new_parser()
        self.reading = Reading.FIRST_REQUEST
        self.number = 0
        """Number of requests that have started to arrive."""
        self.is_last = False
        """No request after the current request is parsed."""
        self.receiver: BodyReceiver | None = None
        """Receives the body that is being parsed."""
        # The request that is being parsed
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: RequestHead
        self._upgrades = False
        self._reparsing = False
        self._overhead = 0
        """Bytes outside of bodies: the request line, headers and trailers, and framing beyond ``_FRAMING_PER_BYTE``."""
        # Results of earlier checks
        self._host = _NEVER
        """The last valid Host."""
        self._last_line = _NEVER
        """The last request line, up to its version."""
        self._repeatable: _Repeatable | None = None
        """An earlier request whose headers may be repeated."""
        self._line_so_far: bytes | None = None
        """A request line that is not complete yet, perhaps with bytes that precede it."""

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises Refusal for bytes that are not a valid request; nothing may be fed after it."""
        while self.reading is not _NOTHING and (self.reading is _BODY or not self.is_last):
            if self._repeatable is not None and self.reading is _NEXT_REQUEST and self._feed_repeated(data):
                return
            self._overhead += len(data)
            try:
                # Most reads contain one request line, at their start, and it is the same as that of the request before.
                if self.reading is _BODY or data.rpartition(_VERSION)[0] != self._last_line:
                    self._feed_by_lines(data)
                else:
                    self._parser.feed_data(data)
                    if self.reading is _NEXT_REQUEST:
                        self._remember(data)
                    elif self.reading is _HEAD and data.find(_HEAD_END) >= 0:
                        self._line_so_far = data[-MAX_HEAD:]
            except httptools.HttpParserCallbackError as error:
                cause = error.__context__ or error
                if not isinstance(cause, _LastRequestParsed):
                    raise cause from None
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._overhead -= len(data)
                self._continue_after_upgrade(data)
                continue
            except httptools.HttpParserError:
                raise Refusal("invalid_request", "The request is not valid HTTP/1.1.") from None
            else:
                if self._overhead > MAX_HEAD:
                    raise _head_too_large()
            return

    def stop(self) -> None:
        """Parse nothing more."""
        self.reading, self.receiver = _NOTHING, None

    def close(self) -> None:
        """Stop, and release the handler."""
        self.stop()
        del self._handler, self._parser  # which refer to this object

    # Repeated requests

    def _remember(self, data: bytes) -> None:
        """Remember the headers of a read that was exactly one request with a Content-Length."""
        head, end = self._head, data.find(_HEAD_END) + len(_HEAD_END)
        if head.content_length is None or end + head.content_length != len(data) or not head.keep_alive or end > _MAX_REPEATABLE:
            return
        length = _CONTENT_LENGTH.search(data, 0, end)
        if length is not None:
            before, after = data[: length.start(1)], data[length.end(1) : end]
            key = _AUTHORIZATION.search(before) or _AUTHORIZATION.search(after)
            self._repeatable = _Repeatable(head, before, after, key is not None and key.string is before, *(key.span(1) if key else (0, 0)))

    def _feed_repeated(self, data: bytes) -> bool:
        """Accept a read that is exactly one request with the remembered headers, except for the Content-Length.

        Most clients send the same headers with each request of a connection. httptools has accepted these bytes in the same state,
        between two requests, so its result is known. It is not fed, which saves a callback for each header. Returns False for other reads.
        """
        repeatable = self._repeatable
        if repeatable is None:
            return False
        end = data.find(b"\r", len(repeatable.before))
        if not (data.startswith(repeatable.before) and data.startswith(repeatable.after, end)):
            return self._repeat_with_other_key(data, repeatable, end) and self._feed_repeated(data)
        digits, body = data[len(repeatable.before) : end], data[end + len(repeatable.after) :]
        if not (digits.isdigit() and len(digits) <= _MAX_DIGITS and int(digits) == len(body)):
            return False
        head = repeatable.head
        if digits != head.headers[b"content-length"]:
            head = _with_field(head, b"content-length", digits)
        self.number += 1
        receiver = self._handler.request_received(head)
        if body:
            receiver.feed(body)
        receiver.finish()
        return True

    def _repeat_with_other_key(self, data: bytes, repeatable: _Repeatable, end: int) -> bool:
        """Remember the Authorization header of a read in place of the known one. Returns False if it is the same or cannot be compared.

        A proxy in front of the gateway sends the requests of many clients on one connection. ``end``: of the digits of the Content-Length.
        """
        _, before, after, precedes, start, stop = repeatable
        at = start if precedes else end + start
        value = data[at : data.find(b"\r", at)]
        # httptools accepts any two words of visible characters where it has accepted the known value.
        if start == 0 or end < 0 or len(value) > _MAX_REPEATABLE:
            return False
        if value.translate(None, _VISIBLE) != b" " or value[0] == _SPACE or value[-1] == _SPACE:
            return False
        known = before if precedes else after
        if known[start:stop] == value:
            return False
        renewed = known[:start] + value + known[stop:]
        before, after = (renewed, after) if precedes else (before, renewed)
        head = _with_field(repeatable.head, b"authorization", value)
        self._repeatable = _Repeatable(head, before, after, precedes, start, start + len(value))
        return True

    # Request lines

    def _feed_by_lines(self, data: bytes) -> None:
        """Feed the bytes so that each request line is fed alone and can be compared with the parser's result.

        llhttp accepts several spaces between the parts of a request line and does not report them. Raises what ``feed_data`` raises.
        """
        at, size = 0, len(data)
        while at < size:
            # Only bytes with a version can complete a request line. All others are fed at once.
            version = data.find(_VERSION, at)
            if version < 0 and self._line_so_far is None:
                end = size
            elif version < 0 or self._line_so_far is not None:
                end = data.find(b"\n", at) + 1 or size
            else:
                end = data.rfind(b"\n", at, version) + 1 or data.find(b"\n", version) + 1 or size
            try:
                self._feed_line(data[at:end])
            except httptools.HttpParserUpgrade as offer:
                raise httptools.HttpParserUpgrade(at + offer.args[0]) from None
            at = end

    def _feed_line(self, line: bytes) -> None:
        number = self.number
        self._parser.feed_data(line)
        so_far = b"" if self.number != number else self._line_so_far
        if so_far is None:
            return
        so_far = (so_far + line)[-MAX_HEAD:]
        if not line.endswith(b"\n"):
            self._line_so_far = so_far
            return
        self._line_so_far = None
        start = b"%b %b" % (self._parser.get_method(), self._url)
        whole = b"%b HTTP/%b\r\n" % (start, self._parser.get_http_version().encode())
        if len(whole) > MAX_HEAD:
            raise _head_too_large()
        if not so_far.endswith(whole):
            raise Refusal("invalid_request", "The request line must have one space between its parts.")
        self._last_line = start

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._reparsing:
            return
        if self.is_last:
            raise _LastRequestParsed
        self.reading = _HEAD
        self.number += 1
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        if not self._reparsing:
            self._url += url
            if len(self._url) > MAX_HEAD:
                raise _head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((_NAMES.get(name) or name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._reparsing:
            self._reparsing = False
            return
        fields, parser = self._headers, self._parser
        if len(fields) > MAX_HEADERS or (self._overhead > MAX_HEAD and self._size(fields) > MAX_HEAD):
            raise _head_too_large()
        version = parser.get_http_version()
        http10 = version != "1.1"
        if http10 and version != "1.0":
            raise Refusal("invalid_request", "The version of HTTP is not 1.0 or 1.1.")
        headers = _by_name(fields, http10)
        if headers.get(b"host") != self._host:
            self._check_host(headers.get(b"host"), http10)
        method, length = parser.get_method(), int(headers[b"content-length"]) if b"content-length" in headers else None
        upgrades = (b"upgrade" in headers or method == _CONNECT) and parser.should_upgrade()
        # Bytes behind an offer of another protocol may be of that protocol, unless they are the request's body.
        has_body = length is not None or b"transfer-encoding" in headers
        keep_alive = parser.should_keep_alive() and (not upgrades or (has_body and method != _CONNECT))
        head = self._head = RequestHead(method, self._url, headers, fields, http10, length, keep_alive)
        self._headers = []  # of trailers, which are not headers (RFC 9110, section 6.5.1)
        if not keep_alive:
            self.is_last = True
        if upgrades:
            self._upgrades = True  # see _continue_after_upgrade
        else:
            self.receiver = self._handler.request_received(head)
        self.reading = _BODY

    def on_body(self, body: bytes) -> None:
        overhead = self._overhead - _FRAMING_PER_BYTE * len(body)
        self._overhead = overhead if overhead > 0 else 0
        if self.receiver is not None:
            self.receiver.feed(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        if self._overhead > MAX_HEAD and self._size([*self._head.fields, *self._headers]) > MAX_HEAD:
            raise _head_too_large()
        receiver, self.receiver = self.receiver, None
        self.reading = _NEXT_REQUEST
        self._overhead = 0
        if receiver is not None:
            receiver.finish()

    def _continue_after_upgrade(self, rest: bytes) -> None:
        """Decide about an offered protocol, and continue to parse if it is declined.

        httptools stops at the end of the headers and treats the request as one without a body. So another parser continues with the framing
        of the body. Java's HTTP client offers HTTP/2 by default.
        """
        self._upgrades = False
        head = self._head
        if self._handler.upgrade_offered(head, rest):
            self.stop()
            return
        self.receiver = self._handler.request_received(head)
        framing = b"".join(b"%b: %b\r\n" % (name, head.headers[name]) for name in _FRAMING if name in head.headers)
        self._parser = self._new_parser()
        self._reparsing = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % (b"" if head.method == _CONNECT else framing))

    # Checks

    def _check_host(self, host: bytes | None, http10: bool) -> None:
        """Require one valid host: the gateway does not use it, but a proxy in front of it may (RFC 9112, section 3.2). Raises Refusal."""
        if host is not None and is_host(host):
            self._host = host
        elif host is not None or not http10:
            raise Refusal("invalid_request", "The header 'host' is missing or no valid host.")

    def _size(self, fields: Iterable[tuple[bytes, bytes]]) -> int:
        """Return the size of a request line with these fields.

        It is called only if a limit may be exceeded, since a read may contain a body.
        """
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in fields)

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # such data is not parsed, and is no error: see ``is_last``
        return parser


class _Repeatable(NamedTuple):
    """A request line and headers, with their bytes before and after the digits of the Content-Length."""

    head: RequestHead
    before: bytes
    after: bytes
    key_precedes: bool
    """The value of the Authorization header is in ``before``, otherwise in ``after``."""
    key_start: int
    """Where that value starts; 0 without that header."""
    key_end: int


def _with_field(head: RequestHead, changed: bytes, value: bytes) -> RequestHead:
    """Return the same headers with another value of a header that was sent once."""
    fields = [(name, value if name == changed else former) for name, former in head.fields]
    headers = head.headers | {changed: value}
    return RequestHead(head.method, head.url, headers, fields, head.http10, int(headers[b"content-length"]), head.keep_alive)


class _LastRequestParsed(Exception):
    """Raised to stop httptools before a request that is not served."""


def is_host(value: bytes) -> bool:
    """Return whether the value of a Host header is one host: a name, or an address as in a URL, perhaps with a port."""
    found = _HOST.fullmatch(value)
    return found is not None and (found[1] is None or _is_ipv6(found[1]))


def _is_ipv6(text: bytes) -> bool:
    try:
        IPv6Address(text.decode("latin-1"))
    except ValueError:
        return False
    return True


def _by_name(fields: Sequence[tuple[bytes, bytes]], http10: bool) -> dict[bytes, bytes]:
    """Return the headers by name. Raises Refusal if one of ``_ONCE`` is repeated, or for a transfer encoding other than ``chunked``."""
    headers = dict(fields)
    if b"transfer-encoding" in headers and (http10 or headers[b"transfer-encoding"].strip(b" ").lower() != b"chunked"):
        raise Refusal("invalid_request", "The only transfer encoding is 'chunked', and with HTTP/1.1 only.")
    if len(headers) < len(fields):
        seen: set[bytes] = set()
        for name, _ in fields:
            if name in seen and name in _ONCE:
                raise Refusal("invalid_request", f"The header '{name.decode('latin-1')}' was sent more than once.")
            seen.add(name)
        headers[FORWARDED] = b",".join(value for name, value in fields if name == FORWARDED)  # one list (RFC 9110, section 5.3)
    return headers


def _head_too_large() -> Refusal:
    return Refusal("headers_too_large", f"The head of the request is larger than {MAX_HEAD} bytes or has more than {MAX_HEADERS} headers.")
