"""The paths of the sign-in. A worker passes the requests for them to control."""

from __future__ import annotations

SIGN_IN, SIGN_OUT, BACK_CHANNEL = "/sign-in", "/sign-out", "/back-channel-logout"
CALLBACK = "/sign-in/callback/"
"""The path of redirect URIs, before the ID of the issuer's entry."""
LINK, SESSION = "/sign-in/link", "/sign-in/session"
MAX_FORM = 32 * 1024
"""Bytes of a form."""
_EXACT = frozenset({SIGN_IN, SIGN_OUT, BACK_CHANNEL, LINK, SESSION})


def endpoint_of(path: str) -> str | None:
    """Return the route of a path as metrics show it; None if it is not of the sign-in."""
    if path in _EXACT:
        return path
    return CALLBACK + "{issuer}" if path.startswith(CALLBACK) else None
