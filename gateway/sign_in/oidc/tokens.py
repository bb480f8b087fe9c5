"""Verify the tokens that a provider sends: ID tokens and logout tokens. Pure; needs PyJWT, which is the extra ``oidc``.

OpenID Connect Core 1.0, section 3.1.3.7, and Back-Channel Logout 1.0, section 2.6. The rules: the accepted algorithms are configured, never
read from a token or from metadata. One kind of token is never accepted as the other: an ID token needs a nonce, which a logout token must
not have.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from typing import Any

import jwt

from gateway.auth.jwks import VerificationKeys
from gateway.sign_in.errors import SignInError, UnknownKeyError
from gateway.sign_in.oidc.provider import Client
from gateway.sign_in.sessions import Logout

MAX_TOKEN = 64 * 1024
"""Bytes of a token; some providers put hundreds of groups into it."""
_LATEST = 200_000_000_000
"""Seconds since the epoch, in the year 8307. Later times cannot be stored."""
_OPAQUE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,255}")
_LOGOUT = "http://schemas.openid.net/event/backchannel-logout"
_ID_TYPES = (None, "jwt")
_LOGOUT_TYPES = (None, "jwt", "logout+jwt")
_REFUSED = "The identity provider's token is not valid. Sign in again."
_PARTS = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\Z")


def verified_id_token(token: str, client: Client, keys: VerificationKeys, nonce: str) -> dict[str, Any]:
    """Return the claims of an ID token. Raises UnknownKeyError, and SignInError."""
    claims = _verified(token, client, keys, _ID_TYPES, ("sub",))
    found = claims.get("nonce")
    if not isinstance(found, str) or not hmac.compare_digest(found.encode(errors="replace"), nonce.encode()):
        raise _refused("its nonce does not belong to this sign-in")
    if isinstance(claims.get("sid"), str) and not _is_opaque(claims["sid"]):
        raise _refused("its session ID is not usable")
    return claims


def verified_logout_token(token: str, client: Client, keys: VerificationKeys) -> Logout:
    """Return the claims of a logout token. Raises UnknownKeyError, and SignInError."""
    claims = _verified(token, client, keys, _LOGOUT_TYPES, ("jti",))
    events = claims.get("events")
    if "nonce" in claims or not isinstance(events, dict) or not isinstance(events.get(_LOGOUT), dict):
        raise _refused("it is not a logout token")
    identity, subject, sid = claims["jti"], claims.get("sub"), claims.get("sid")
    named = [each for each in (subject, sid) if each is not None]
    if not named or not all(_is_opaque(each) for each in (identity, *named)):
        raise _refused("it names neither a subject nor a session")
    if int(claims["exp"]) > _LATEST:
        raise _refused("it expires too late")
    return Logout(client.issuer, identity, float(claims["exp"]) + client.leeway, subject, sid)


def _is_opaque(value: object) -> bool:
    """Return whether a value is an identifier that every database can store. It may have spaces."""
    return isinstance(value, str) and _OPAQUE.fullmatch(value) is not None


def unverified_issuer(token: str) -> str | None:
    """Return the issuer that a token claims, to select the keys that verify it."""
    try:
        if len(token) > MAX_TOKEN:
            return None
        found = jwt.decode(token, options={"verify_signature": False}).get("iss")
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _verified(
    token: str, client: Client, keys: VerificationKeys, types: tuple[str | None, ...], required: tuple[str, ...]
) -> dict[str, Any]:
    """Verify what both kinds of tokens have in common: form, algorithm, key, signature, issuer, audience and times."""
    header = _header(token)
    algorithm, kind, identity = header.get("alg"), header.get("typ"), header.get("kid")
    if (kind.lower() if isinstance(kind, str) else kind) not in types or "crit" in header:
        raise _refused("its header is of another kind of token")
    if algorithm not in client.algorithms:
        raise _refused(f"it is not signed by one of {', '.join(client.algorithms)}")
    if not isinstance(identity, str | None):
        raise _refused("its key ID is not a text")
    if (key := keys.find(identity, algorithm)) is None:
        raise UnknownKeyError(_REFUSED, detail="the issuer has not published its key", status=502)
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            issuer=client.issuer,
            audience=client.client_id,
            leeway=client.leeway,
            options={"require": ["iss", "aud", "exp", "iat", *required]},
        )
    except (jwt.PyJWTError, ValueError, OverflowError, RecursionError) as error:
        raise _refused(f"PyJWT: {type(error).__name__}") from None
    _check_audience(claims, client)
    return claims


def _check_audience(claims: Mapping[str, Any], client: Client) -> None:
    """Check that a token is for this client alone (OpenID Connect Core 1.0, section 3.1.3.7, items 3 to 5). Raises SignInError."""
    audience = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
    if any(each != client.client_id for each in audience) or claims.get("azp", client.client_id) != client.client_id:
        raise _refused("it is for another client too")


def _header(token: str) -> dict[str, Any]:
    if len(token) > MAX_TOKEN or not _PARTS.match(token):
        raise _refused("it is not a signed token of a usable size")
    try:
        return jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _refused("its header is invalid") from None


def _refused(detail: str) -> SignInError:
    return SignInError(_REFUSED, detail=f"a token was refused: {detail}", status=502)
