"""An identity provider's side of the protocol: its metadata, the code exchange, and the end of its session. Sans I/O.

OpenID Connect Discovery 1.0, OAuth 2.0 (RFC 6749) with PKCE (RFC 7636), RP-Initiated Logout 1.0. The rules: metadata must name the
configured issuer, and an endpoint without TLS is used only if the configured issuer has none. Nothing that a provider sends is shown to
people.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import quote_plus, urlencode, urlsplit

import msgspec

from gateway.sign_in.errors import SignInError

_UNAVAILABLE = "The identity provider sent an unusable response. Try again later."


@dataclass(frozen=True, slots=True)
class Client:
    """The gateway as a client of one issuer.

    ``id`` is the ID of the issuer's entry, ``name`` its name for people, ``leeway`` in seconds.
    """

    id: str
    issuer: str
    name: str
    client_id: str
    client_secret: str | None = field(default=None, repr=False)
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    leeway: float = 30.0
    ca: str | None = None


class Metadata(msgspec.Struct, frozen=True):
    """The provider's metadata, as far as it is used. Defaults are those of OpenID Connect Discovery 1.0, section 3."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    end_session_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    code_challenge_methods_supported: tuple[str, ...] | None = None
    authorization_response_iss_parameter_supported: bool = False


class _TokenResponse(msgspec.Struct):
    id_token: str


class _TokenError(msgspec.Struct):
    error: str


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A POST to the token endpoint."""

    url: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)


def metadata_url(issuer: str) -> str:
    """Return the URL of an issuer's metadata (OpenID Connect Discovery 1.0, section 4)."""
    return issuer.rstrip("/") + "/.well-known/openid-configuration"


def parsed_metadata(document: bytes, issuer: str) -> Metadata:
    """Return the metadata of the configured issuer. Raises SignInError."""
    try:
        metadata = msgspec.json.decode(document, type=Metadata)
    except msgspec.DecodeError as error:
        raise _unusable(f"its metadata is invalid: {error}") from None
    if metadata.issuer != issuer:
        raise _unusable(f"its metadata names the issuer {metadata.issuer[:200]!r} instead of {issuer}")
    methods = metadata.code_challenge_methods_supported
    if methods is not None and "S256" not in methods:
        raise _unusable("it does not support PKCE with S256")
    for name in ("authorization_endpoint", "token_endpoint", "jwks_uri", "end_session_endpoint"):
        url = getattr(metadata, name)
        if url is not None and not _is_usable(url, urlsplit(issuer).scheme):
            raise _unusable(f"its {name} is not a usable URL")
    return metadata


def _is_usable(url: str, scheme_of_issuer: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url and not parts.fragment and not parts.username
    return is_plain and bool(parts.hostname) and (parts.scheme == "https" or parts.scheme == scheme_of_issuer == "http")


def token_request(client: Client, metadata: Metadata, code: str, verifier: str, redirect_uri: str) -> TokenRequest:
    """Return the exchange of a code for tokens (RFC 6749, section 4.1.3; RFC 7636, section 4.5)."""
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri, "code_verifier": verifier}
    headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
    if client.client_secret is None:
        form["client_id"] = client.client_id
    elif "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
        pair = f"{quote_plus(client.client_id)}:{quote_plus(client.client_secret)}"  # RFC 6749, section 2.3.1
        headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    else:
        form |= {"client_id": client.client_id, "client_secret": client.client_secret}
    return TokenRequest(metadata.token_endpoint, headers, urlencode(form).encode())


def id_token_of(status: int, body: bytes) -> str:
    """Return the ID token in a response of the token endpoint. Raises SignInError."""
    try:
        if status == 200:
            return msgspec.json.decode(body, type=_TokenResponse).id_token
        error = msgspec.json.decode(body, type=_TokenError).error
    except msgspec.DecodeError:
        raise _unusable(f"its token endpoint sent no ID token (status {status})") from None
    if error == "invalid_grant":
        raise SignInError("This sign-in has expired or was used before. Sign in again.", detail="the provider refused the code")
    raise _unusable(f"its token endpoint refused the request: {error[:100]!r}")


def end_session_url(client: Client, metadata: Metadata, id_token: str | None, return_to: str) -> str | None:
    """Return where a person ends the provider's own session (RP-Initiated Logout 1.0, section 2); None without such an endpoint."""
    if metadata.end_session_endpoint is None:
        return None
    hint = {} if id_token is None else {"id_token_hint": id_token}
    return with_query(metadata.end_session_endpoint, {**hint, "client_id": client.client_id, "post_logout_redirect_uri": return_to})


def with_query(url: str, parameters: dict[str, str]) -> str:
    """Return a URL with further parameters. Those that it has are retained (RFC 6749, section 3.1)."""
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(parameters)}"


def _unusable(detail: str) -> SignInError:
    return SignInError(_UNAVAILABLE, detail=detail, status=502)
