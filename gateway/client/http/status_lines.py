"""Status lines of HTTP/1.1 responses, as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
STATUS_LINES: Mapping[int, bytes] = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}
"""By status code. A code without a standard reason phrase has an empty one (RFC 9112, section 4)."""
