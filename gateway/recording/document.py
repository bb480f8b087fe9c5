"""The stored form of a record: one JSON object. Pure.

The rule: every field is named here. No header is stored: the headers before the body are skipped.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson

from gateway.recording.capture import Capture
from gateway.recording.redaction import NotParsedError, Redactor, Removed
from gateway.telemetry.request_record import RequestRecord
from upstream.http.sse import Splitter, split

VERSION = 1

_HEAD_END = b"\r\n\r\n"
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_LINE_END = b"\r\n"

Piece = tuple[float, bytes]
"""Bytes of a body, and when they were written."""


def document(capture: Capture, record: RequestRecord, redactor: Redactor) -> bytes:
    """Return the record of a request. Raises NotParsedError for a body that must be redacted and is not JSON."""
    received, removed = bytes(capture.received), Removed()
    sent = _sent(capture)
    pieces = list(body_pieces(capture.pieces))
    if redactor:
        original = received
        received, removed = redactor.request(original)
        if sent is not None:
            sent = redactor.sent(sent, original, removed)
        pieces = list(_redacted(pieces, capture, record.status, redactor, removed))
    response: dict[str, Any] = {"status": record.status}
    if capture.is_event_stream:
        response["events"] = [{"at": round(at - capture.received_at, 6), **_text(data)} for at, data in pieces]
    else:
        response |= _text(b"".join(data for _, data in pieces))
    usage = record.usage
    return orjson.dumps(
        {
            "version": VERSION,
            "id": record.id,
            "started": record.started,
            "key": None if record.key is None else record.key.id,
            "endpoint": record.endpoint,
            "path": capture.path,
            "model": record.model,
            "requested_model": record.requested_model,
            "split": record.split,
            "server": record.server,
            "code": record.code,
            "incomplete": record.incomplete,
            "duration": record.duration,
            "queued": record.queued,
            "first_byte": record.first_byte,
            "first_token": record.first_token,
            "usage": None if usage is None else msgspec.structs.asdict(usage),
            "redacted": bool(redactor),
            "request": _text(received),
            "sent": None if sent is None or _is_same(sent, received) else _text(sent),
            "response": response,
        }
    )


def _sent(capture: Capture) -> bytes | None:
    """Return the body that the last server got; None if no server was tried."""
    return None if capture.sent is None or capture.served_model is None else capture.sent.encode(capture.served_model)


def body_pieces(written: Iterable[tuple[float, Any]]) -> Iterator[Piece]:
    """Yield the body of a response from what was written to its client: the headers, then the body, in chunks or not.

    A write has at most one chunk, because the gateway frames each write by itself.
    """
    head: bytes | None = b""
    is_chunked = False
    for at, data in written:
        data = bytes(data)
        if head is not None:
            head += data
            end = head.find(_HEAD_END)
            if end < 0:
                continue
            end += len(_HEAD_END)
            is_chunked, data, head = _CHUNKED in head[:end], head[end:], None
        if is_chunked and data:
            data = b"" if data == _LAST_CHUNK else data[data.index(_LINE_END) + len(_LINE_END) : -len(_LINE_END)]
        if data:
            yield at, data


def _redacted(pieces: list[Piece], capture: Capture, status: int, redactor: Redactor, removed: Removed) -> Iterator[Piece]:
    """Yield a response without the configured fields. Raises NotParsedError."""
    if not capture.is_event_stream:
        if body := b"".join(data for _, data in pieces):
            yield pieces[-1][0], redactor.response(body, status, removed)
        return
    splitter = Splitter(sum(len(data) for _, data in pieces))
    for at, data in pieces:
        if events := b"".join(redactor.event(event, removed) for event in split(splitter.feed(data))):
            yield at, events
    if splitter.take().strip():
        raise NotParsedError


def _is_same(sent: bytes, received: bytes) -> bool:
    """Return whether two JSON bodies have the same fields and values."""
    return bool(orjson.loads(sent) == orjson.loads(received))


def _text(data: bytes) -> dict[str, str]:
    """Return bytes as text, or in base64 if they are not UTF-8."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def data_in(part: dict[str, Any]) -> bytes:
    """Return the bytes of a part of a stored record."""
    return base64.b64decode(part["base64"]) if "base64" in part else str(part.get("text", "")).encode()
