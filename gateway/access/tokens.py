"""Admin tokens: who presents one. Pure.

The rule: a presented token is compared with every configured one in constant time, so the duration of a refusal shows nothing about them.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from gateway.access.actor import Actor, Role


@dataclass(frozen=True, slots=True)
class Token:
    """A configured token. ``digest`` is its SHA-256, and ``expires`` an aware datetime."""

    name: str
    digest: bytes
    role: Role
    expires: datetime | None = None

    @property
    def actor(self) -> Actor:
        return Actor("token", self.name, self.role)

    def has_expired(self, now: datetime) -> bool:
        """Return whether it has expired at the aware datetime ``now``."""
        return self.expires is not None and self.expires <= now


def digest_of(token: bytes) -> bytes:
    """Return the SHA-256 of a token."""
    return sha256(token).digest()


def presented_token(authorization: bytes, tokens: Iterable[Token]) -> Token | None:
    """Return the token of an Authorization header, also if it has expired. None for any other text."""
    scheme, _, text = authorization.partition(b" ")
    digest = digest_of(text.strip(b" "))
    found = [token for token in tokens if hmac.compare_digest(digest, token.digest)]
    return found[0] if found and scheme.lower() == b"bearer" else None
