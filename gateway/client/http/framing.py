"""The requests of one connection, from its bytes, without I/O: where each begins and ends, and its body.

The rules: bytes are collected until a request line and its headers are complete, and then read as a whole (``head``). A body is counted by
its length, or decoded by one decoder (``upstream.http.chunked``). So the requests depend on the bytes alone, not on how they are cut into
reads. One request is passed on at a time: while the handler wants no further request, the bytes after it are stored unparsed. All that is
stored is bounded.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from gateway.api.errors import Refusal
from gateway.client.http.head import MAX_HEAD, RequestHead, check_start, head_too_large, invalid_request, parse_head, with_length
from upstream.http.chunked import ChunkedDecoder, ChunkedError, FramingTooLargeError
from upstream.http.repeated_headers import RepeatedHeaders

AHEAD = 64 * 1024
"""Bytes of a body that may be passed on before the request is started."""
_LINE_END, _HEAD_END, _CR = b"\r\n", b"\r\n\r\n", 0x0D
_CHUNKS_AT_ONCE = 2048  # chunks or lines of a body that are decoded in one event-loop iteration


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

    def body_follows(self) -> None:
        """Start the request now. More than ``AHEAD`` bytes have arrived after its headers, and they need an owner."""

    def body_stored(self) -> None:
        """Call ``feed`` without bytes in a later event-loop iteration: a part of the body is stored unparsed."""


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
        self.reading = Reading.FIRST_REQUEST
        self.number = 0
        """Number of requests that have started to arrive."""
        self.is_last = False
        """No request after the current request is parsed."""
        self.is_blocked = False
        """The handler wants no further request. It calls ``feed`` without bytes when it does."""
        self.receiver: BodyReceiver | None = None
        """Receives the body that is being parsed."""
        self._left = 0
        """Bytes of a body with a length that are still to come."""
        self._chunks: ChunkedDecoder | None = None
        self.stored: bytes | bytearray = b""
        """Bytes that have not been parsed: a part of a request line and headers, the rest of a body in many chunks, or bytes after a
        request while the parser is blocked."""
        self._blank = 0
        """Bytes of empty lines before a request."""
        self._headers = RepeatedHeaders(parse_head, with_length)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises Refusal for bytes that are not a valid request; nothing may be fed after it."""
        if self.stored:
            data = self._with_stored(data)
        at, size = 0, len(data)
        while at < size:
            if self.reading is _BODY:
                at = self._feed_body(data, at)
            elif self.is_last:
                return
            elif self.is_blocked:
                self.stored = data[at:]
                return
            else:
                at = self._begin_request(data, at)

    def _with_stored(self, data: bytes) -> bytes:
        """Return the stored bytes with these ones; nothing if all of them have to wait. Raises Refusal."""
        stored = self.stored if isinstance(self.stored, bytearray) else bytearray(self.stored)
        stored += data
        if (self.is_blocked and self.reading is not _BODY) or (self.reading is _HEAD and self._is_incomplete(stored, data)):
            self.stored = stored
            return b""
        self.stored = b""
        return bytes(stored)

    def stop(self) -> None:
        """Parse nothing more."""
        self.reading, self.receiver, self.stored, self.is_last = _NOTHING, None, b"", True

    def close(self) -> None:
        """Stop, and release the handler."""
        self.stop()
        del self._handler  # which refers to this object

    # Request lines and headers

    def _begin_request(self, data: bytes, start: int) -> int:
        """Read an empty line, or a whole request line with its headers. Returns the index of the first byte that was not read.

        Incomplete headers are stored. If no more than ``AHEAD`` bytes of body follow, and that is all of it, they are passed on too.
        """
        if data[start] == _CR and data.startswith(_LINE_END, start):
            self._blank += len(_LINE_END)
            if self._blank > MAX_HEAD:
                raise head_too_large()
            return start + len(_LINE_END)
        end = data.find(_HEAD_END, start)
        if end < 0:
            self._store_start(data[start:])
            return len(data)
        end += 4  # after them
        if self.reading is not _HEAD:
            self.number += 1
        self._blank = 0
        head = self._headers.parse(data[start:end])
        if not head.keep_alive:
            self.is_last = True
        receiver = self._handler.request_received(head)
        length, arrived = head.content_length or 0, len(data) - end
        if length <= arrived and length <= AHEAD and not head.chunked:
            self.reading = _NEXT_REQUEST
            end += length
            if length:
                receiver.feed(data[end - length : end])
            receiver.finish()
            return end
        self.reading, self.receiver = _BODY, receiver
        self._left, self._chunks = length, ChunkedDecoder(MAX_HEAD) if head.chunked else None
        if arrived > AHEAD:
            self._handler.body_follows()
        return end

    def _store_start(self, start: bytes) -> None:
        """Store the first part of a request line and headers. Raises Refusal if it cannot become valid."""
        self.stored = start
        if start != b"\r":  # perhaps an empty line before the request
            self.reading = _HEAD
            self.number += 1
            self._is_incomplete(start, start)

    def _is_incomplete(self, stored: bytes | bytearray, data: bytes) -> bool:
        """Return whether the stored bytes do not contain the end of the headers. ``data`` is their new part. Raises Refusal."""
        if stored.find(_HEAD_END, max(len(stored) - len(data) - len(_HEAD_END) + 1, 0)) >= 0:
            return False
        if stored.find(b"\n", 0, len(stored) - len(data)) < 0:  # the request line was not complete before
            check_start(stored if data.find(b"\n") >= 0 else stored[max(len(stored) - len(data) - 1, 0) :])
        if len(stored) > MAX_HEAD:
            raise head_too_large()
        return True

    # Bodies

    def _feed_body(self, data: bytes, at: int) -> int:
        """Pass on the next bytes of a body. Returns the index of the first byte after them. Raises Refusal.

        The rest of a body in many chunks is stored: other connections are served in between.
        """
        receiver, chunks = self.receiver, self._chunks
        assert receiver is not None
        if chunks is None:
            piece = data[at : at + self._left]
            self._left -= len(piece)
            at += len(piece)
            receiver.feed(piece)
            is_complete = not self._left
        else:
            try:
                at = chunks.feed(data, at, receiver.feed, _CHUNKS_AT_ONCE)
            except ChunkedError:
                raise invalid_request() from None
            except FramingTooLargeError:
                raise head_too_large() from None
            is_complete = chunks.finished
        if self.receiver is None:  # the receiver has stopped this parser
            return len(data)
        if is_complete:
            self.receiver, self.reading = None, _NEXT_REQUEST
            receiver.finish()
        elif at < len(data):
            self.stored = data[at:]
            self._handler.body_stored()
            return len(data)
        return at
