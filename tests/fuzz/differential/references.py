"""HTTP messages as h11 and llhttp read them: each message by a new parser, which gets the whole of its bytes.

llhttp (httptools) does not report where a message ends. Plain rules find the end (``_head_end``, ``chunked_end``), and llhttp confirms it:
it must not complete the message one byte before, and must complete it with that byte. Otherwise the message counts as refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import h11
import httptools

Fields = tuple[tuple[bytes, bytes], ...]
_FRAMING = (b"content-length", b"transfer-encoding")
_BAD = (httptools.HttpParserError, ValueError)
_LINE_ENDS = b"\r\n"
_MAX_HEAD = 1 << 20


class Message(NamedTuple):
    """A request or a response.

    ``first``: the method and the target, or the status. ``body``: the received part. ``end``: the index behind the message; None if the
    message is not complete.
    """

    first: tuple[object, ...]
    fields: Fields
    version: str
    keep_alive: bool
    body: bytes
    end: int | None


class Reading(NamedTuple):
    """A message that a reference reads, None without valid headers. ``refused``: the bytes are invalid, perhaps in the body."""

    message: Message | None
    refused: bool


INCOMPLETE, REFUSED = Reading(None, False), Reading(None, True)


class _Events:
    """Stores what httptools reports of one message."""

    def __init__(self, kind: Any) -> None:
        self.url, self.body = b"", b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.keep_alive = self.has_head = self.is_complete = self.upgrades = False
        self.parser = kind(self)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:
            self.fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.has_head, self.keep_alive = True, self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True

    def has_ended(self) -> bool:
        """Return ``is_complete``, which each call of the parser may change."""
        return self.is_complete


def start_of_message(data: bytes, at: int) -> int:
    """Return where the first line starts: blank lines may precede it (RFC 9112, section 2.2)."""
    while at < len(data) and data[at] in _LINE_ENDS:
        at += 1
    return at


def _head_end(data: bytes, at: int) -> int | None:
    end = data.find(b"\r\n\r\n", start_of_message(data, at))
    return None if end < 0 else end + 4


def chunked_end(data: bytes, at: int) -> int | None:
    """Return where a chunked body that starts at ``at`` ends; None if its end has not arrived or cannot be found."""
    while (line := data.find(b"\r\n", at)) >= 0:
        try:
            size = int(data[at:line].partition(b";")[0], 16)
        except ValueError:
            return None
        at = line + 2
        if size == 0:
            while (line := data.find(b"\r\n", at)) > at:
                at = line + 2
            return None if line < 0 else line + 2
        if size < 0:
            return None
        at += size + 2
    return None


def _read_head(events: _Events, data: bytes, at: int, end: int | None) -> bool | None:
    """Return whether the headers are complete and valid; None if they are not complete."""
    try:
        if end is None:
            events.parser.feed_data(data[at:])
            return False if events.has_head else None
        events.parser.feed_data(data[at : end - 1])
        if events.has_head:
            return False
        events.parser.feed_data(data[end - 1 : end])
    except httptools.HttpParserUpgrade:
        events.upgrades = True
    except _BAD:
        return False
    return events.has_head


def _read_body(events: _Events, data: bytes, at: int, framing: dict[bytes, bytes]) -> tuple[int | None, bool]:
    """Read a framed body. Return its end, None if it is not complete, and whether it is refused."""
    end: int | None = at
    if b"transfer-encoding" in framing:
        end = chunked_end(data, at)
    elif b"content-length" in framing:
        end = at + int(framing[b"content-length"])
        if end > len(data):
            end = None
    if end == at:
        return (at, False) if events.is_complete else (None, True)
    try:
        events.parser.feed_data(data[at : None if end is None else end - 1])
        if events.is_complete or end is None:
            return None, events.is_complete
        events.parser.feed_data(data[end - 1 : end])
    except _BAD:
        return None, True
    return (end, False) if events.has_ended() else (None, True)


def _framing(fields: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    return {name: value for name, value in fields if name in _FRAMING}


def llhttp_request(data: bytes, at: int) -> Reading:
    """Read a request with llhttp."""
    events, end = _Events(httptools.HttpRequestParser), _head_end(data, at)
    valid = _read_head(events, data, at, end)
    if not valid or end is None:
        return INCOMPLETE if valid is None else REFUSED
    method, keep_alive, framing, reader = events.parser.get_method(), events.keep_alive, _framing(events.fields), events
    if events.upgrades:  # the gateway declines the offer, and the request is an ordinary one; a CONNECT has no body
        framing = {} if method == b"CONNECT" else framing
        keep_alive, reader = keep_alive and bool(framing), _Events(httptools.HttpRequestParser)
        try:
            reader.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % field for field in framing.items()))
        except httptools.HttpParserError:
            return REFUSED
    stop, refused = _read_body(reader, data, end, framing)
    version = events.parser.get_http_version()
    return Reading(Message((method, events.url), tuple(events.fields), version, keep_alive, reader.body, stop), refused)


def llhttp_response(data: bytes, at: int, *, closed: bool) -> Reading:
    """Read the final response with llhttp, behind its interim responses. ``closed``: the connection is closed behind the bytes."""
    events, end = _Events(httptools.HttpResponseParser), _head_end(data, at)
    valid = _read_head(events, data, at, end)
    if not valid or end is None or events.upgrades:
        return INCOMPLETE if valid is None else REFUSED
    status, version, framing = events.parser.get_status_code(), events.parser.get_http_version(), _framing(events.fields)
    if status < 200:
        return llhttp_response(data, end, closed=closed)
    if status in (204, 304):
        framing = {}
    elif not framing:  # the body ends with the connection
        body = data[end:]
        return Reading(Message((status,), tuple(events.fields), version, False, body, len(data) if closed else None), False)
    stop, refused = _read_body(events, data, end, framing)
    return Reading(Message((status,), tuple(events.fields), version, events.keep_alive, events.body, stop), refused)


def h11_request(data: bytes, at: int) -> Reading:
    """Read a request with h11."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
    connection.receive_data(data[start_of_message(data, at) :])
    return _h11_message(connection, len(data))


def h11_response(data: bytes, at: int, *, closed: bool) -> Reading:
    """Read the final response with h11, behind its interim responses. ``closed``: the connection is closed behind the bytes."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "a"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data[at:])
    if closed:
        connection.receive_data(b"")
    return _h11_message(connection, len(data))


def _h11_message(connection: h11.Connection, size: int) -> Reading:
    """Read the message that a connection has received, of ``size`` bytes with those before and behind it."""
    found: h11.Request | h11.Response | None = None
    body, complete, refused = b"", False, False
    try:
        while not complete and isinstance(event := connection.next_event(), h11.Event):
            if isinstance(event, h11.Request | h11.Response):
                found = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                complete = True
            elif not isinstance(event, h11.InformationalResponse):
                break  # the connection is closed
    except h11.RemoteProtocolError:
        refused = True
    if found is None:
        return REFUSED if refused else INCOMPLETE
    first = (found.method, found.target) if isinstance(found, h11.Request) else (found.status_code,)
    keep_alive = connection.their_state is not h11.MUST_CLOSE
    return Reading(_message(first, found, keep_alive, body, size, connection, complete), refused)


def _message(
    first: tuple[object, ...],
    head: h11.Request | h11.Response,
    keep_alive: bool,
    body: bytes,
    size: int,
    connection: h11.Connection,
    complete: bool,
) -> Message:
    end = size - len(connection.trailing_data[0]) if complete else None
    fields = tuple((bytes(name), bytes(value)) for name, value in head.headers)
    return Message(first, fields, head.http_version.decode(), keep_alive, body, end)
