"""Verify tokens of identity providers (JSON Web Tokens, RFC 7519). ``claims`` makes the key of a verified one.

The rules: a token is verified once and the result is cached until the token expires, so an ordinary request costs two look-ups. If
possible, a token is refused before its signature is checked. All caches are bounded, whatever clients send. There is no I/O: a
worker requests unknown keys from control.
"""

from __future__ import annotations

import re
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jwt
import orjson

from gateway.api.errors import Refusal
from gateway.auth.claims import SubjectKeys, VerifiedToken, read_claims
from gateway.auth.jwks import VerificationKeys
from gateway.snapshot.snapshot import Issuer, Key, Snapshot

_FORM = re.compile(rb"e[w-z0-9_-][A-Za-z0-9_-]*\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\Z")  # the first bytes encode a brace
_MAX_VERIFIED = 20_000
_MAX_REFUSED = 5_000
_REFUSED_FOR = 10.0  # seconds
_REQUEST_EVERY = 1.0  # seconds between two requests to control for one issuer
V = TypeVar("V")


class TokenVerifier:
    """Verifies and caches the tokens of a worker. ``on_unknown_key`` is called with an issuer when one of its keys is unknown."""

    def __init__(self, on_unknown_key: Callable[[str], None]) -> None:
        self._on_unknown_key = on_unknown_key
        self._issuers: tuple[Issuer, ...] = ()
        self._by_name: dict[str, tuple[Issuer, VerificationKeys | None]] = {}
        self._verified_tokens: dict[bytes, VerifiedToken] = {}
        self._refused: dict[bytes, tuple[str, str, float]] = {}
        self._principals: dict[bytes, Key] = {}  # by token, of this snapshot
        self._next_request: dict[str, float] = {}
        self._subject_keys = SubjectKeys()
        self._limit = 0

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Use this snapshot for new requests. Verified tokens stay cached unless an issuer or its keys changed."""
        self._principals.clear()
        self._subject_keys.apply_snapshot(snapshot)
        if snapshot.issuers != self._issuers:
            self._issuers = snapshot.issuers
            self._by_name = {issuer.name: (issuer, _verification_keys(issuer)) for issuer in snapshot.issuers}
            self._limit = max(issuer.limit for issuer in snapshot.issuers)
            self._verified_tokens.clear()
            self._refused.clear()

    def principal(self, token: bytes, digest: bytes) -> Key | None:
        """Return the principal of a token; None if this is not a token. ``digest`` is its SHA-256. Raises Refusal."""
        if (key := self._principals.get(digest)) is None:
            if not _FORM.match(token):
                return None
            key = self._subject_keys.key_of(self._verified(token, digest))
            _keep(self._principals, digest, key, _MAX_VERIFIED)
        if key.expires is not None and time.time() >= key.expires:
            raise Refusal(*_EXPIRED)
        return key

    def _verified(self, token: bytes, digest: bytes) -> VerifiedToken:
        """Return the cached result for a token, or verify it. Raises Refusal, also a cached one."""
        if (known := self._verified_tokens.get(digest)) is not None:
            return known
        before = self._refused.get(digest)
        if before is not None and time.monotonic() < before[2]:
            raise Refusal(before[0], before[1])
        try:
            verified = self._verify(token)
        except Refusal as refusal:
            if refusal.spec.status == 401:
                _keep(self._refused, digest, (refusal.code, refusal.message, time.monotonic() + _REFUSED_FOR), _MAX_REFUSED)
            raise
        _keep(self._verified_tokens, digest, verified, _MAX_VERIFIED)
        return verified

    def _verify(self, token: bytes) -> VerifiedToken:
        """Verify a token, cheapest check first. Raises Refusal."""
        if len(token) > self._limit:
            raise Refusal("invalid_api_key", f"The token is larger than {self._limit} bytes.")
        head, claims, _ = token.split(b".")
        header, claimed = _object(head), _object(claims)
        name, algorithm, expires = claimed.get("iss"), header.get("alg"), claimed.get("exp")
        known = self._by_name.get(name) if isinstance(name, str) else None
        if known is None:
            raise Refusal("invalid_api_key", "The token's issuer is not known here.")
        issuer, keys = known
        if len(token) > issuer.limit:
            raise Refusal("invalid_api_key", f"The token is larger than {issuer.limit} bytes.")
        if algorithm not in issuer.algorithms:
            raise Refusal("invalid_api_key", f"The token is not signed by one of {', '.join(issuer.algorithms)}.")
        if isinstance(expires, int | float) and time.time() >= expires + issuer.leeway:
            raise Refusal(*_EXPIRED)
        if keys is None:
            raise Refusal("overloaded", "The keys of the token's issuer are not known yet.")
        identity = header.get("kid")
        key = keys.find(identity, algorithm) if identity is None or isinstance(identity, str) else None
        if key is None:
            self._request_keys(issuer.name)
            raise Refusal("invalid_api_key", "The token is signed by a key that its issuer has not published, as far as is known here.")
        return read_claims(_decode(token, key, issuer), issuer)

    def _request_keys(self, issuer: str) -> None:
        """Request an issuer's keys from control, at most once a second, whatever tokens clients send."""
        now = time.monotonic()
        if now >= self._next_request.get(issuer, 0.0):
            self._next_request[issuer] = now + _REQUEST_EVERY
            self._on_unknown_key(issuer)


def _keep(where: dict[bytes, V], digest: bytes, value: V, most: int) -> None:
    """Cache a value, and remove the oldest one if there are too many."""
    if len(where) >= most:
        del where[next(iter(where))]
    where[digest] = value


def _verification_keys(issuer: Issuer) -> VerificationKeys | None:
    return None if issuer.key_set is None else VerificationKeys(issuer.key_set, issuer.algorithms)


def _decode(token: bytes, key: jwt.PyJWK, issuer: Issuer) -> dict[str, Any]:
    """Verify the signature, and return the claims. Raises Refusal."""
    try:
        return jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=issuer.audiences,
            issuer=issuer.name,
            leeway=issuer.leeway,
            options={"require": ["exp", "iss", "aud"]},
        )
    except jwt.MissingRequiredClaimError as error:
        raise Refusal("invalid_api_key", f"The token has no claim {error.claim}.") from None
    except (jwt.PyJWTError, ValueError, OverflowError, RecursionError) as error:
        code, message = next((found for kind, found in _MESSAGES.items() if isinstance(error, kind)), _INVALID)
        raise Refusal(code, message) from None


_INVALID = ("invalid_api_key", "The token is not valid.")
_EXPIRED = ("expired_api_key", "The token has expired.")
_MESSAGES: Mapping[type[Exception], tuple[str, str]] = {
    jwt.ExpiredSignatureError: _EXPIRED,
    jwt.ImmatureSignatureError: ("invalid_api_key", "The token is not valid yet."),
    jwt.InvalidAudienceError: ("invalid_api_key", "The token is for another audience."),
    jwt.InvalidSignatureError: ("invalid_api_key", "The token's signature is wrong."),
}


def _object(part: bytes) -> dict[str, Any]:
    """Decode a part of a token, which is JSON in base64. Raises Refusal."""
    try:
        found = orjson.loads(urlsafe_b64decode(part + b"=" * (-len(part) % 4)))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Refusal(*_INVALID)
    return found
