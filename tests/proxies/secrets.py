"""Secrets of requests. Each one names the key under which its request may run.

The rule: a secret occurs in one request only, so a response with it shows which request it belongs to. A secret of ``NO_KEY`` must not
reach a server: its request has no valid key, or it is in the body of another request.
"""

from __future__ import annotations

import hashlib
import random
import re

NO_KEY = "none"
_TOKEN_SUBJECTS = 50
_PATTERN = re.compile(rb"secret-(none|\d{4})-[0-9a-f]{16}")
_STATIC = 950
KEYS = _STATIC + _TOKEN_SUBJECTS
"""Number of keys: the last ``_TOKEN_SUBJECTS`` are subjects of an identity provider."""
ENTRY = "staff"
"""The key entry to which tokens of the identity provider map."""


def new(dice: random.Random, owner: str) -> bytes:
    """Return a new secret of a key number or ``NO_KEY``."""
    return b"secret-%b-%016x" % (owner.encode(), dice.getrandbits(64))


def found(data: bytes) -> set[bytes]:
    """Return all secrets in some bytes."""
    return {match[0] for match in _PATTERN.finditer(data)}


def first(data: bytes) -> bytes | None:
    """Return the first secret in some bytes, which is the request's: a body starts with it."""
    match = _PATTERN.search(data)
    return match[0] if match else None


def owner(secret: bytes) -> str:
    """Return the key number in a secret, or ``NO_KEY``."""
    return secret.split(b"-")[1].decode()


def is_subject(number: int) -> bool:
    """Return whether the key is a subject of the identity provider."""
    return number >= _STATIC


def identity(number: int) -> str:
    """Return the ID of a key in the access log."""
    return f"{ENTRY}/user-{number:04}" if is_subject(number) else f"key-{number:04}"


def plain_key(number: int) -> str:
    """Return the API key of a configured key."""
    return f"sk-shared-{number:04}"


def configured() -> list[dict[str, str]]:
    """Return the ``keys`` of the configuration."""
    hashes = {number: hashlib.sha256(plain_key(number).encode()).hexdigest() for number in range(_STATIC)}
    return [{"id": identity(number), "hash": f"sha256:{digest}"} for number, digest in hashes.items()] + [{"id": ENTRY}]
