"""Authenticate a request: from its headers to a key of the configuration.

The rule: no I/O, and nothing that unauthenticated clients send is stored. A key is hashed and looked up in a dict made from the
snapshot, and then in the dict of the store's keys, which may be empty. This runs before the body is read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from gateway.api.errors import Refusal
from gateway.auth import keys
from gateway.auth.stored_keys import StoredKeyring, with_expiry
from gateway.snapshot.snapshot import Key

if TYPE_CHECKING:
    from gateway.auth.jwt import TokenVerifier

_TOKEN = re.compile(rb"[\x21-\x7e]+\Z")  # of visible ASCII (RFC 6750's b64token and every key in use)
_MAX_LENGTH = 512  # bytes of a key

_QUOTED = "The API key is in quotes. Send it without them."
_PLACEHOLDER = "The API key is a placeholder: it begins with '{}'. Put the key in its place."
_INVALID_STARTS: Mapping[bytes, str] = dict.fromkeys((b'"', b"'", b"`"), _QUOTED) | {
    mark.encode(): _PLACEHOLDER.format(mark) for mark in "$<{"
}
"""Characters that no key starts with, and the message for each: such a key is a mistake in a shell or a configuration file."""

_MISPLACED = (b"x-api-key", b"api-key", b"x-goog-api-key")
"""Headers in which other APIs send a key. Only Anthropic's routes read the first header."""


class Keyring:
    """The keys of one snapshot by the SHA-256 of each. ``verifier`` checks tokens of identity providers. ``stored``: keys of the store."""

    def __init__(self, keys: Iterable[Key], verifier: TokenVerifier | None = None, stored: StoredKeyring | None = None) -> None:
        self._verifier = verifier
        self._stored = stored or StoredKeyring()
        self._by_digest: dict[bytes, Key] = {}
        self._anonymous: Key | None = None
        for key in keys:
            self._by_digest.update((digest, with_expiry(key, digest)) for digest in key.digests)
            if key.anonymous and not key.revoked:
                self._anonymous = key

    def authenticate(self, authorization: bytes | None, api_key: bytes | None = None, sent: Container[bytes] = ()) -> Key:
        """Return the key of a request, from ``Authorization: Bearer`` or, if the route supports it, from ``x-api-key``.

        ``sent``: the names of all headers, to detect a key in a header that no route reads. Raises Refusal missing_api_key,
        invalid_api_key or expired_api_key. If an anonymous key is configured, requests without a key are anonymous, and so are
        bearers that cannot be a configured key (clients send ``not-needed``). A malformed or misplaced key is refused.
        """
        token = api_key if authorization is None else _bearer(authorization)
        if not token:
            return self._without_key(authorization, api_key, sent)
        digest = sha256(token).digest()
        key = self._by_digest.get(digest)
        if key is None and self._stored.by_digest:  # an empty store costs no look-up
            key = self._stored.by_digest.get(digest)
        if key is None:
            return (self._verifier.principal(token, digest) if self._verifier is not None else None) or self._unknown_key(token)
        if key.expires is not None and _is_expired(key):
            if key.revoked:
                raise Refusal("invalid_api_key", "This API key has been revoked.")
            raise Refusal("expired_api_key", "This API key has expired.")
        return key

    def _without_key(self, authorization: bytes | None, api_key: bytes | None, sent: Container[bytes]) -> Key:
        if authorization is not None:
            raise Refusal("missing_api_key", "The Authorization header has no key after 'Bearer'. Set the key, or leave the header out.")
        if api_key is not None:
            raise Refusal("missing_api_key", "The header 'x-api-key' is empty. Set the key, or leave the header out.")
        for name in _MISPLACED:
            if name in sent:
                raise Refusal(
                    "invalid_api_key", f"The header '{name.decode()}' is not read here. Send the key as 'Authorization: Bearer <key>'."
                )
        anonymous = self._anonymous
        if anonymous is None or _is_expired(anonymous):
            raise Refusal("missing_api_key", "No API key was sent. Send it as 'Authorization: Bearer <key>'.")
        return anonymous

    def _unknown_key(self, token: bytes) -> Key:
        if token[:1] in _INVALID_STARTS:
            raise Refusal("invalid_api_key", _INVALID_STARTS[token[:1]])
        if _TOKEN.match(token) is None:
            raise Refusal("invalid_api_key", "The API key contains a space or another character that keys do not have.")
        anonymous = self._anonymous
        if anonymous is not None and not token.startswith(b"sk-") and not _is_expired(anonymous):
            return anonymous
        if len(token) > _MAX_LENGTH:
            raise Refusal("invalid_api_key", f"The API key is longer than {_MAX_LENGTH} bytes.")
        if _mistyped(token):
            raise Refusal("invalid_api_key", "The API key is mistyped: its checksum is wrong.")
        if self._stored.is_unknown:
            raise Refusal("overloaded", "The API key can't be verified at the moment.")
        raise Refusal("invalid_api_key", "The API key is not valid.")


def _is_expired(key: Key) -> bool:
    return key.expires is not None and time.time() >= key.expires


def _mistyped(token: bytes) -> bool:
    return keys.has_key_format(text := token.decode("ascii")) and not keys.has_valid_checksum(text)


def _bearer(value: bytes) -> bytes:
    """Return the token of an Authorization header, with the scheme in any case (RFC 9110, section 11.1).

    Raises Refusal invalid_api_key for another scheme.
    """
    if value[:7] == b"Bearer ":
        return value[7:].strip(b" ")
    scheme, _, token = value.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Refusal("invalid_api_key", "The Authorization header must have the form 'Bearer <key>'.")
    return token.strip(b" ")
