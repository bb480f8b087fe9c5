"""An issuer that the configuration trusts turns hostile: in its documents, its responses, its tokens, and their size and speed.

``issuer`` is the hostile one. ``other`` is a host of the attacker, to which it leads the gateway.
"""

from __future__ import annotations

import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx2
import jwt
import pytest

from tests.gateway.sign_in.ports import Ports
from tests.support import zstd
from tests.support.issuer import SigningKey, part
from tests.support.oidc_issuer import LOGOUT_EVENT, SECRET, OidcIssuer

METADATA, KEYS, TOKEN = "/.well-known/openid-configuration", "/keys", "/token"
BOMB = 128 << 20
"""Bytes of a decoded response."""
Handler = Callable[[BaseHTTPRequestHandler], None]


def redirect(to: str) -> Handler:
    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(307)
        request.send_header("location", to)
        request.send_header("content-length", "0")
        request.end_headers()

    return respond


def encoded(body: bytes, coding: str) -> Handler:
    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-type", "application/json")
        request.send_header("content-encoding", coding)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return respond


async def refused(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    """Check that the sign-in is refused with a page of the gateway, and that the gateway still responds."""
    response = await browser.get(f"{gateway.origins['data']}/sign-in", params={"issuer": "one"})
    if response.status_code == 303:
        response = await browser.get(issuer.approve(response.headers["location"], groups=["llm-admins"]))
    assert response.status_code == 502 and "Sign-in failed" in response.text, response.text
    assert await gateway.person(browser) is None


@pytest.mark.parametrize("path", [METADATA, KEYS, TOKEN], ids=["metadata", "keys", "token"])
async def test_a_redirect_is_not_followed(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer, path: str
) -> None:
    issuer.hostile[path] = redirect(other.url + path)
    await refused(gateway, browser, issuer)
    assert other.requests == [] and other.exchanges == []


@pytest.mark.parametrize("path", [METADATA, KEYS, TOKEN], ids=["metadata", "keys", "token"])
async def test_an_endless_response_is_cut(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, path: str) -> None:
    cut = threading.Event()

    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        with suppress(OSError):
            while True:
                request.wfile.write(b" " * 65536)
        cut.set()

    issuer.hostile[path] = respond
    await refused(gateway, browser, issuer)
    assert cut.wait(60), "the gateway closes the connection"


async def test_a_slow_response_is_cut(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    """Bytes arrive all the time, so that no timeout between two of them helps."""
    cut = threading.Event()

    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        with suppress(OSError):
            while not cut.wait(0.2):
                request.wfile.write(b" ")
        cut.set()

    issuer.hostile[METADATA] = respond
    await refused(gateway, browser, issuer)
    assert cut.wait(60), "the gateway closes the connection"


def _bomb(coding: str) -> bytes:
    """Return an encoded response of less than a megabyte. Decoded, it is blank text of ``BOMB`` bytes."""
    if coding == "zstd":
        return zstd.compress(b" " * BOMB)
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join((*(compressor.compress(b" " * (1 << 20)) for _ in range(BOMB >> 20)), compressor.flush()))


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_compressed_response_takes_no_memory(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, coding: str) -> None:
    issuer.hostile[METADATA] = encoded(_bomb(coding), coding)
    tracemalloc.start()
    try:
        await refused(gateway, browser, issuer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20, peak


async def test_keys_that_a_token_names_are_not_fetched(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer
) -> None:
    """The attacker signs with an own key, and names where to fetch it, in every way that JWS has."""
    headers = {"jku": f"{other.url}/keys", "x5u": f"{other.url}/cert", "jwk": other.keys[0].jwk()}
    issuer.sign = lambda claims: jwt.encode(claims, other.keys[0].private, "ES256", headers={"kid": f"{other.url}/keys", **headers})
    await refused(gateway, browser, issuer)
    assert other.requests == []


async def test_claims_come_only_from_the_id_token(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer
) -> None:
    """Substitute the user: offer further claims elsewhere, in the metadata (UserInfo), and in the token (distributed claims)."""
    issuer.metadata = {"userinfo_endpoint": f"{other.url}/userinfo"}
    elsewhere = {"_claim_names": {"groups": "src"}, "_claim_sources": {"src": {"endpoint": f"{other.url}/groups", "access_token": "t"}}}
    for claims in ({"groups": None}, {"groups": None, **elsewhere}):
        assert (await gateway.sign_in(browser, issuer, **claims)).status_code == 403
    assert other.requests == [] and "/userinfo" not in issuer.requests
    assert await gateway.person(browser) is None


async def test_a_token_of_another_issuer_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer
) -> None:
    """Both issuers use the same key ID."""
    issuer.sign = other.signed
    await refused(gateway, browser, issuer)


@pytest.mark.parametrize("published", [True, False], ids=["published", "known to both"])
async def test_a_shared_secret_verifies_nothing(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, published: bool) -> None:
    """Sign with the client secret, which OpenID Connect allows, or with a symmetric key in the JWKS."""
    if published:
        issuer.published.append({"kty": "oct", "k": part(SECRET.encode()), "kid": "es", "alg": "HS256", "use": "sig"})
    issuer.sign = lambda claims: jwt.encode(claims, SECRET, "HS256", headers={"kid": "es"})
    await refused(gateway, browser, issuer)


async def test_a_private_key_in_the_jwks_is_refused(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    issuer.published[0]["d"] = part(b"a private key")
    await refused(gateway, browser, issuer)


async def test_a_weak_key_is_not_used(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    """An RSA key of 1,024 bits can be factored (RFC 7518, section 3.3)."""
    from cryptography.hazmat.primitives.asymmetric import rsa

    weak = SigningKey("RS256", "weak")
    weak.private = rsa.generate_private_key(65537, 1024)
    issuer.published = [weak.jwk()]
    issuer.sign = lambda claims: issuer.signed(claims, weak)
    await refused(gateway, browser, issuer)


TEXTS: dict[str, dict[str, Any]] = {
    "half a character as nonce": {"nonce": "\ud800"},
    "half a character as session": {"sid": "\ud800"},
    "NUL in the session": {"sid": "s\0"},
    "a long session": {"sid": "s" * 10_000},
    "half a character as subject": {"sub": "\ud800"},
    "NUL in the subject": {"sub": "a\0"},
}


@pytest.mark.parametrize("attack", TEXTS)
async def test_a_claim_that_no_database_can_store_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, attack: str
) -> None:
    """The refusal has an entry in the audit log, which a failure of the gateway would not have."""
    issuer.sign = lambda claims: signed_bytes(issuer, claims)
    response = await gateway.sign_in(browser, issuer, **TEXTS[attack])
    assert response.status_code in (400, 502) and await gateway.person(browser) is None, response.text
    assert gateway.actions() == ["person.sign_in.refused"]


LOGOUTS: dict[str, dict[str, Any]] = {
    "half a character as subject": {"sub": "\ud800"},
    "NUL in the session": {"sid": "s\0"},
    "half a character as ID": {"sub": "alice", "jti": "\ud800"},
    "a time that no calendar has": {"sub": "alice", "exp": 2**53},
}


@pytest.mark.parametrize("attack", LOGOUTS)
async def test_a_logout_that_no_database_can_store_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, attack: str
) -> None:
    assert (await gateway.sign_in(browser, issuer)).status_code == 303
    claims = {"iss": issuer.url, "aud": "vllm-gateway", "iat": 1, "exp": 2**33, "jti": "1", "events": {LOGOUT_EVENT: {}}, **LOGOUTS[attack]}
    response = await browser.post(f"{gateway.origins['data']}/back-channel-logout", data={"logout_token": signed_bytes(issuer, claims)})
    assert (response.status_code, response.json()["error"]) == (400, "invalid_request")
    assert gateway.actions()[-1] == "person.logout.refused"
    assert await gateway.person(browser) is not None


def signed_bytes(issuer: OidcIssuer, claims: dict[str, Any]) -> str:
    """Return a signed token whose claims may be anything that JSON can have."""
    key = issuer.keys[0]
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key.private, key.algorithm, headers={"kid": key.kid})
