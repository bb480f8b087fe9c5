"""Select the keys of an issuer's JWKS (RFC 7517) that verify tokens. Pure.

The rule: only public keys for signatures. A symmetric key, which could create tokens as well, is never used, whatever the document
says. An algorithm is bound to a key before any token is seen (RFC 8725, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Mapping[str, tuple[str, ...]] = {
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
    "Ed448": ("EdDSA",),
}
_MIN_RSA, _MAX_RSA = 2048, 8192  # bits; RFC 7518, section 3.3, and what is checked in a millisecond
_MAX_KEYS = 100


class KeySetError(Exception):
    """A document is not a usable JWKS; the text says why, to be appended to its name."""


def verification_keys(document: bytes) -> bytes:
    """Return the keys of a JWKS that can verify tokens, as a JSON list of JWKs. Raises KeySetError."""
    if not (found := [key for key in _keys(document) if _can_verify(key)]):
        raise KeySetError("has no public key for signatures")
    return orjson.dumps(found[:_MAX_KEYS])


def _keys(document: bytes) -> list[dict[str, Any]]:
    try:
        whole = orjson.loads(document)
    except orjson.JSONDecodeError:
        raise KeySetError("is not JSON") from None
    keys = whole.get("keys") if isinstance(whole, dict) else None
    if not isinstance(keys, list):
        raise KeySetError('is not a key set: expected {"keys": [...]}')
    if any(isinstance(key, dict) and key.get("kty") != "oct" and "d" in key for key in keys):
        raise KeySetError("contains a private key; only public keys are allowed")
    return [key for key in keys if isinstance(key, dict)]


def _can_verify(key: Mapping[str, Any]) -> bool:
    """Check whether a key is intended to verify signatures, and is able to."""
    operations = key.get("key_ops", ["verify"])
    is_meant = key.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    return is_meant and any(_to_jwk(key, algorithm) is not None for algorithm in _algorithms(key))


def _algorithms(key: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the algorithms of a key, by its type and its own ``alg``."""
    kind, curve, named = key.get("kty"), key.get("crv"), key.get("alg")
    supported = _RSA if kind == "RSA" else _CURVES.get(curve, ()) if kind in ("EC", "OKP") and isinstance(curve, str) else ()
    named = "EdDSA" if named in ("Ed25519", "Ed448") else named  # RFC 9864's names
    return supported if named is None else tuple(name for name in supported if name == named)


def _to_jwk(key: Mapping[str, Any], algorithm: str) -> jwt.PyJWK | None:
    try:
        jwk = jwt.PyJWK(dict(key), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    size = jwk.key.key_size if isinstance(jwk.key, RSAPublicKey) else _MIN_RSA
    return jwk if _MIN_RSA <= size <= _MAX_RSA else None


class VerificationKeys:
    """The keys of a JWKS, each with its ID and an algorithm."""

    def __init__(self, keys: bytes, algorithms: Iterable[str]) -> None:
        """Load keys as ``verification_keys`` returns them."""
        self._keys: list[tuple[object, str, jwt.PyJWK]] = []
        for key in orjson.loads(keys):
            for algorithm in frozenset(algorithms).intersection(_algorithms(key)):
                if (jwk := _to_jwk(key, algorithm)) is not None:
                    self._keys.append((key.get("kid"), algorithm, jwk))

    def find(self, identity: str | None, algorithm: str) -> jwt.PyJWK | None:
        """Return the key that a token names. A token without a key ID uses the only key for its algorithm."""
        found = [jwk for named, each, jwk in self._keys if each == algorithm and identity in (None, named)]
        return found[0] if len(found) == 1 or (found and identity is not None) else None
