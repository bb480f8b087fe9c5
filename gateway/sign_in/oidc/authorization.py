"""The authorization request and its response (OpenID Connect Core 1.0, section 3.1.2; RFC 7636; RFC 9207; RFC 9700). Sans I/O.

The rules: a response counts only in the browser that started the sign-in, once, until it expires, and for the issuer and the port that were
chosen then. Each issuer has its own redirect URI, so the response of one issuer is not accepted for another one, also without RFC 9207.
Nonce and PKCE verifier are derived from the state and the key, and are stored nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.sign_in.browser import Port
from gateway.sign_in.errors import SignInError
from gateway.sign_in.oidc.provider import Client, Metadata, with_query
from gateway.sign_in.paths import CALLBACK
from gateway.sign_in.signature import Signer, encoded

ATTEMPT_SECONDS = 600
"""The time that a person has to sign in at the provider."""
_MAX_CODE = 4096  # characters
_AGAIN = "This sign-in was not started in this browser, or has expired. Sign in again."
_READ = ("code", "state", "iss", "error")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A sign-in that was started. ``provider`` is the ID of the issuer's entry. ``expires`` is in seconds since the epoch."""

    provider: str
    issuer: str
    port: Port
    state: str
    return_to: str
    expires: int


@dataclass(frozen=True, slots=True)
class Started:
    """Where to send the browser, and the value of the cookie that binds the attempt to it."""

    url: str
    cookie: str


def attempts(key: bytes) -> Signer[Attempt]:
    """Return the signer of attempts."""
    return Signer(key, "sign-in attempt", Attempt)


def redirect_uri(origin: str, provider: str) -> str:
    """Return the redirect URI of an issuer's entry, which is registered at the provider."""
    return f"{origin}{CALLBACK}{provider}"


def start(signer: Signer[Attempt], client: Client, metadata: Metadata, port: Port, origin: str, return_to: str, now: float) -> Started:
    """Start a sign-in: return the authorization request. ``return_to`` is a path of this origin."""
    attempt = Attempt(client.id, client.issuer, port, secrets.token_urlsafe(32), return_to, int(now) + ATTEMPT_SECONDS)
    challenge = encoded(hashlib.sha256(verifier_of(signer, attempt).encode()).digest())
    parameters = {
        "response_type": "code",
        "client_id": client.client_id,
        "redirect_uri": redirect_uri(origin, client.id),
        "scope": " ".join(client.scopes),
        "state": attempt.state,
        "nonce": nonce_of(signer, attempt),
        "code_challenge": challenge,
        "code_challenge_method": "S256",
    }
    return Started(with_query(metadata.authorization_endpoint, parameters), signer.sign(attempt))


def nonce_of(signer: Signer[Attempt], attempt: Attempt) -> str:
    """Return the nonce that the ID token of an attempt must contain."""
    return signer.derive("nonce", attempt.state)


def verifier_of(signer: Signer[Attempt], attempt: Attempt) -> str:
    """Return the PKCE code verifier of an attempt."""
    return signer.derive("verifier", attempt.state)


def checked_attempt(
    signer: Signer[Attempt], cookie: str | None, provider: str, port: Port, query: Iterable[tuple[str, str]], now: float
) -> Attempt:
    """Return the attempt that belongs to the response at a redirect URI. Raises SignInError.

    ``provider`` is the ID in the path of the redirect URI.
    """
    state = _parameters(query).get("state", "")
    attempt = None if cookie is None else signer.read(cookie)
    if attempt is None or now >= attempt.expires or not hmac.compare_digest(state.encode(), attempt.state.encode()):
        raise SignInError(_AGAIN, detail="the state does not belong to this browser, or has expired")
    if (attempt.provider, attempt.port) != (provider, port):
        raise SignInError(_AGAIN, detail=f"the sign-in was started at {attempt.provider} on the {attempt.port} port")
    return attempt


def checked_code(attempt: Attempt, query: Iterable[tuple[str, str]], *, needs_issuer: bool) -> str:
    """Return the authorization code of a response. Raises SignInError.

    ``needs_issuer``: the provider announces that it sends ``iss`` (RFC 9207, section 2.4).
    """
    sent = _parameters(query)
    if ("iss" in sent or needs_issuer) and sent.get("iss") != attempt.issuer:
        raise SignInError(_AGAIN, detail="the response is of another issuer, or does not name its issuer")
    if "error" in sent:
        denied = sent["error"] == "access_denied"
        text = "The identity provider did not sign you in." if denied else "The identity provider refused the sign-in."
        raise SignInError(text, detail=f"the provider's error is {sent['error'][:100]!r}", status=403)
    code = sent.get("code", "")
    if not 0 < len(code) <= _MAX_CODE:
        raise SignInError(_AGAIN, detail="the response has no usable code")
    return code


def _parameters(query: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Return the parameters that are read. A repeated one is invalid (RFC 6749, section 3.1). Raises SignInError."""
    read = [(name, value) for name, value in query if name in _READ]
    if len(dict(read)) != len(read):
        raise SignInError(_AGAIN, detail="the response has a parameter twice")
    return dict(read)
