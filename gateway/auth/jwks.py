"""An issuer's key set (RFC 7517): which of its keys can check a token, and what checks one with each.

Pure. The rule: public keys for signatures alone. A symmetric key, which could make tokens as well, is no key here whatever a document
says, and an algorithm is bound to a key before any token is seen (RFC 8725, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jwt
import orjson
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",), "Ed25519": ("EdDSA",), "Ed448": ("EdDSA",)}
)
_LEAST_RSA, _MOST_RSA = 2048, 8192  # bits; RFC 7518, section 3.3, and what is checked in a millisecond
_MOST_KEYS = 100


class KeySetError(Exception):
    """A document that is no key set to be used; the text says why, behind the document's name."""


def verification_keys(document: bytes) -> bytes:
    """What of a JWKS can check tokens, as a JSON list of JWKs. Raises KeySetError."""
    found = [key for key in _keys(document) if _checks(key)]
    if not found:
        raise KeySetError("has no public key for signatures")
    return orjson.dumps(found[:_MOST_KEYS])


def _keys(document: bytes) -> list[dict[str, Any]]:
    try:
        whole = orjson.loads(document)
    except orjson.JSONDecodeError:
        raise KeySetError("is not JSON") from None
    keys = whole.get("keys") if isinstance(whole, dict) else None
    if not isinstance(keys, list):
        raise KeySetError('is no key set: expected {"keys": [...]}')
    if any(isinstance(key, dict) and key.get("kty") != "oct" and "d" in key for key in keys):
        raise KeySetError("holds a private key; only public ones belong here")
    return [key for key in keys if isinstance(key, dict)]


def _checks(key: Mapping[str, Any]) -> bool:
    """Whether a key is there to check signatures, and can."""
    operations = key.get("key_ops", ["verify"])
    meant = key.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    return meant and any(_made(key, algorithm) is not None for algorithm in _algorithms(key))


def _algorithms(key: Mapping[str, Any]) -> tuple[str, ...]:
    """What a key is good for, by its kind and by what it says itself."""
    kind, curve, own = key.get("kty"), key.get("crv"), key.get("alg")
    fit = _RSA if kind == "RSA" else _CURVES.get(curve, ()) if kind in ("EC", "OKP") and isinstance(curve, str) else ()
    own = "EdDSA" if own in ("Ed25519", "Ed448") else own  # RFC 9864's names
    return fit if own is None else tuple(name for name in fit if name == own)


def _made(key: Mapping[str, Any], algorithm: str) -> jwt.PyJWK | None:
    try:
        made = jwt.PyJWK(dict(key), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    size = made.key.key_size if isinstance(made.key, RSAPublicKey) else _LEAST_RSA
    return made if _LEAST_RSA <= size <= _MOST_RSA else None


class VerificationKeys:
    """The keys of a set, by their id and an algorithm."""

    def __init__(self, keys: bytes, algorithms: Iterable[str]) -> None:
        """``keys`` is as ``verification_keys`` gives it."""
        self._by_id: dict[tuple[str | None, str], jwt.PyJWK] = {}
        self._by_algorithm: dict[str, list[jwt.PyJWK]] = {}
        for identity, algorithm, made in _all(orjson.loads(keys), frozenset(algorithms)):
            self._by_id.setdefault((identity, algorithm), made)
            self._by_algorithm.setdefault(algorithm, []).append(made)

    def find(self, identity: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key that a token names. One that names none can only mean the one that there is."""
        if identity is not None:
            return self._by_id.get((identity, algorithm))
        fit = self._by_algorithm.get(algorithm, [])
        return fit[0] if len(fit) == 1 else None


def _all(keys: Iterable[Mapping[str, Any]], wanted: frozenset[str]) -> Iterator[tuple[str | None, str, jwt.PyJWK]]:
    for key in keys:
        for algorithm in _algorithms(key):
            made = _made(key, algorithm) if algorithm in wanted else None
            if made is not None:
                identity = key.get("kid")
                yield identity if isinstance(identity, str) else None, algorithm, made
