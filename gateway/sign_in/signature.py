"""Sign the values that a browser stores for the gateway (RFC 2104, HMAC with SHA-256).

The rule: each purpose has its own key, derived from the configured one, so a value that was signed for one purpose is invalid for every
other. A value is decoded only after its signature was verified.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Generic, TypeVar

import msgspec

MAX_VALUE = 3800
"""Bytes of a signed value. A browser stores cookies of at least 4,096 bytes with name and attributes (RFC 6265, section 6.1)."""
T = TypeVar("T")


def encoded(data: bytes) -> str:
    """Return base64url without padding (RFC 7515, section 2)."""
    return urlsafe_b64encode(data).rstrip(b"=").decode()


class Signer(Generic[T]):
    """Signs values of one type for one purpose. ``key`` is the configured key."""

    def __init__(self, key: bytes, purpose: str, kind: type[T]) -> None:
        self._key = hmac.digest(key, b"vllm-gateway " + purpose.encode(), hashlib.sha256)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def derive(self, use: str, value: str) -> str:
        """Return a secret of 256 bits for one use of a value, as base64url of 43 characters."""
        return encoded(self._mac(f"{use} {value}".encode()))

    def sign(self, value: T) -> str:
        """Return a value and its signature as text for a cookie."""
        body = encoded(self._encoder.encode(value))
        return f"{body}.{encoded(self._mac(body.encode()))}"

    def read(self, text: str) -> T | None:
        """Return the value of a signed text, or None if it was not signed for this purpose."""
        body, _, mac = text.partition(".")
        if len(text) > MAX_VALUE or not text.isascii() or not hmac.compare_digest(encoded(self._mac(body.encode())), mac):
            return None
        try:
            return self._decoder.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        except (msgspec.DecodeError, ValueError):  # signed by a version with other fields
            return None

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)
