"""ID tokens and logout tokens of honest and hostile issuers."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.jwks import VerificationKeys, verification_keys
from gateway.sign_in.errors import SignInError, UnknownKeyError
from gateway.sign_in.oidc.provider import Client
from gateway.sign_in.oidc.tokens import unverified_issuer, verified_id_token, verified_logout_token
from tests.support.issuer import SigningKey, part
from tests.support.oidc_issuer import LOGOUT_EVENT

ISSUER = "https://login.example.com"
CLIENT = Client("one", ISSUER, "One", "gateway")
ES, RS, ED, HIDDEN = SigningKey("ES256", "es"), SigningKey("RS256", "rs"), SigningKey("EdDSA", "ed"), SigningKey("ES256", "es")
DOCUMENT = json.dumps({"keys": [each.jwk() for each in (ES, RS, ED)]}).encode()
KEYS = VerificationKeys(verification_keys(DOCUMENT), CLIENT.algorithms)
NONCE = "the-nonce"


def id_claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    usual = {"iss": ISSUER, "aud": "gateway", "sub": "alice", "iat": now, "exp": now + 300, "nonce": NONCE}
    return {name: value for name, value in (usual | more).items() if value is not None}


def logout_claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    usual = {"iss": ISSUER, "aud": "gateway", "sub": "alice", "iat": now, "exp": now + 120, "jti": "1", "events": {LOGOUT_EVENT: {}}}
    return {name: value for name, value in (usual | more).items() if value is not None}


def signed(claims: dict[str, Any], key: SigningKey = ES, **headers: Any) -> str:
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key.private, key.algorithm, headers={"kid": key.kid, **headers})


def assembled(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    return f"{part(header)}.{part(claims)}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize("key", [ES, RS, ED], ids=["ES256", "RS256", "EdDSA"])
def test_a_token_of_each_algorithm_is_accepted(key: SigningKey) -> None:
    assert verified_id_token(signed(id_claims(), key), CLIENT, KEYS, NONCE)["sub"] == "alice"


def by_shared_secret() -> str:
    """Sign with the public key as a shared secret, which a naive verifier accepts (RFC 8725, section 2.1)."""
    head = f"{part({'alg': 'HS256', 'kid': 'es'})}.{part(id_claims())}"
    mac = hmac.digest(ES.pem, head.encode(), "sha256")
    return f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def swapped() -> str:
    """Put the claims of one token to the signature of another."""
    head, _, signature = signed(id_claims()).split(".")
    return f"{head}.{part(id_claims(sub='root'))}.{signature}"


HOUR = 3600
FORGED: dict[str, Callable[[], str]] = {
    "alg none": lambda: assembled({"alg": "none"}, id_claims()),
    "alg None": lambda: assembled({"alg": "None", "kid": "es"}, id_claims()),
    "alg none with a signature": lambda: assembled({"alg": "none", "kid": "es"}, id_claims(), b"signature"),
    "no alg": lambda: assembled({"kid": "es"}, id_claims(), b"signature"),
    "alg list": lambda: assembled({"alg": ["ES256"], "kid": "es"}, id_claims(), b"signature"),
    "the public key as a shared secret": by_shared_secret,
    "no signature": lambda: signed(id_claims()).rpartition(".")[0] + ".",
    "claims of another token": swapped,
    "another key with the same ID": lambda: signed(id_claims(), HIDDEN),
    "a key in the header": lambda: signed(id_claims(), HIDDEN, jwk=HIDDEN.jwk()),
    "a URL of keys in the header": lambda: signed(id_claims(), HIDDEN, jku="https://evil.example.com/keys"),
    "a certificate in the header": lambda: signed(id_claims(), HIDDEN, x5c=["MIIB"]),
    "a certificate URL in the header": lambda: signed(id_claims(), HIDDEN, x5u="https://evil.example.com/cert"),
    "an algorithm of another key": lambda: assembled({"alg": "RS256", "kid": "es"}, id_claims(), b"signature"),
    "the algorithm twice": lambda: part(b'{"alg":"ES256","kid":"es","alg":"none"}') + f".{part(id_claims())}.c2ln",
    "a URL as key ID": lambda: signed(id_claims(), HIDDEN, kid="https://evil.example.com/keys#es"),
    "another form of the key ID": lambda: signed(id_claims(), HIDDEN, kid="ES"),
    "a path as key ID": lambda: signed(id_claims(), HIDDEN, kid="../../dev/null"),
    "SQL as key ID": lambda: signed(id_claims(), HIDDEN, kid="' OR 1=1 --"),
    "a list as key ID": lambda: assembled({"alg": "ES256", "kid": ["es"]}, id_claims(), b"signature"),
    "an empty key ID": lambda: signed(id_claims(), HIDDEN, kid=""),
    "no key ID": lambda: assembled({"alg": "ES256"}, id_claims(), b"signature"),
    "a critical extension": lambda: signed(id_claims(), crit=["exp"]),
    "an access token": lambda: signed(id_claims(), typ="at+jwt"),
    "a logout token": lambda: signed(logout_claims(), typ="logout+jwt"),
    "a logout token without a type": lambda: signed(logout_claims()),
    "another issuer": lambda: signed(id_claims(iss="https://evil.example.com")),
    "nearly the issuer": lambda: signed(id_claims(iss=ISSUER + "/")),
    "issuers": lambda: signed(id_claims(iss=[ISSUER])),
    "no issuer": lambda: signed(id_claims(iss=None)),
    "another audience": lambda: signed(id_claims(aud="other")),
    "a further audience": lambda: signed(id_claims(aud=["gateway", "other"])),
    "a further audience with azp": lambda: signed(id_claims(aud=["gateway", "other"], azp="gateway")),
    "no audience": lambda: signed(id_claims(aud=None)),
    "empty audience": lambda: signed(id_claims(aud=[])),
    "another authorized party": lambda: signed(id_claims(azp="other")),
    "expired": lambda: signed(id_claims(exp=int(time.time()) - HOUR)),
    "no expiry": lambda: signed(id_claims(exp=None)),
    "an expiry that is text": lambda: signed(id_claims(exp="tomorrow")),
    "an infinite expiry": lambda: assembled({"alg": "ES256", "kid": "es"}, id_claims(exp=1e400), b"signature"),
    "issued in the future": lambda: signed(id_claims(iat=int(time.time()) + HOUR, exp=int(time.time()) + 2 * HOUR)),
    "not valid yet": lambda: signed(id_claims(nbf=int(time.time()) + HOUR)),
    "no time of issue": lambda: signed(id_claims(iat=None)),
    "another nonce": lambda: signed(id_claims(nonce="other")),
    "no nonce": lambda: signed(id_claims(nonce=None)),
    "a list of nonces": lambda: signed(id_claims(nonce=[NONCE])),
    "no subject": lambda: signed(id_claims(sub=None)),
    "an encrypted token": lambda: "a.b.c.d.e",
    "a list": lambda: f"{part([])}.{part(id_claims())}.c2ln",
    "too large": lambda: signed(id_claims(x="x" * 70_000)),
    "nothing": lambda: "",
    "a space": lambda: " " + signed(id_claims()),
    "a line break": lambda: signed(id_claims()) + "\n",
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_id_token_is_refused(attack: str) -> None:
    with pytest.raises(SignInError, match="token is not valid") as refused:
        verified_id_token(FORGED[attack](), CLIENT, KEYS, NONCE)
    assert refused.value.detail and "eyJ" not in refused.value.detail


def test_a_token_with_an_unknown_key_leads_to_a_fetch() -> None:
    with pytest.raises(UnknownKeyError):
        verified_id_token(signed(id_claims(), kid="new"), CLIENT, KEYS, NONCE)


def test_an_algorithm_that_is_not_configured_is_refused() -> None:
    only = replace(CLIENT, algorithms=("RS256",))
    with pytest.raises(SignInError):
        verified_id_token(signed(id_claims()), only, VerificationKeys(verification_keys(DOCUMENT), only.algorithms), NONCE)


def test_a_token_is_accepted_within_the_leeway_and_with_a_single_audience_in_a_list() -> None:
    claims = id_claims(exp=int(time.time()) - 5, aud=["gateway"], azp="gateway")
    assert verified_id_token(signed(claims, typ="jwt"), CLIENT, KEYS, NONCE)["sub"] == "alice"


def test_a_logout_token_names_a_session_or_a_subject() -> None:
    logout = verified_logout_token(signed(logout_claims(sid="s", sub=None), typ="logout+jwt"), CLIENT, KEYS)
    assert (logout.issuer, logout.identity, logout.subject, logout.sid) == (ISSUER, "1", None, "s")
    assert verified_logout_token(signed(logout_claims()), CLIENT, KEYS).subject == "alice"


NO_LOGOUT: dict[str, Callable[[], str]] = {
    "an ID token": lambda: signed(id_claims(jti="1")),
    "an ID token with the event": lambda: signed(logout_claims(nonce=NONCE)),
    "a null nonce": lambda: signed({**logout_claims(), "nonce": None}),
    "no event": lambda: signed(logout_claims(events=None)),
    "another event": lambda: signed(logout_claims(events={"https://example.com/event": {}})),
    "an event that is text": lambda: signed(logout_claims(events=LOGOUT_EVENT)),
    "an event without an object": lambda: signed(logout_claims(events={LOGOUT_EVENT: True})),
    "neither subject nor session": lambda: signed(logout_claims(sub=None)),
    "empty names": lambda: signed(logout_claims(sub="", sid="")),
    "a subject that is a number": lambda: signed(logout_claims(sub=None, sid=5)),
    "no ID": lambda: signed(logout_claims(jti=None)),
    "an ID that is a number": lambda: signed(logout_claims(jti=5)),
    "expired": lambda: signed(logout_claims(exp=int(time.time()) - HOUR)),
    "no expiry": lambda: signed(logout_claims(exp=None)),
    "another audience": lambda: signed(logout_claims(aud="other")),
    "another issuer": lambda: signed(logout_claims(iss="https://evil.example.com")),
    "another key": lambda: signed(logout_claims(), HIDDEN),
    "alg none": lambda: assembled({"alg": "none"}, logout_claims()),
    "an access token": lambda: signed(logout_claims(), typ="at+jwt"),
}


@pytest.mark.parametrize("attack", NO_LOGOUT)
def test_a_forged_logout_token_is_refused(attack: str) -> None:
    with pytest.raises(SignInError, match="token is not valid"):
        verified_logout_token(NO_LOGOUT[attack](), CLIENT, KEYS)


@given(st.text(max_size=100))
def test_arbitrary_text_is_no_token(text: str) -> None:
    assert unverified_issuer(text) is None
    with pytest.raises(SignInError):
        verified_id_token(text, CLIENT, KEYS, NONCE)


def test_the_issuer_that_a_token_claims() -> None:
    assert unverified_issuer(signed(logout_claims(), HIDDEN)) == ISSUER
    assert unverified_issuer(signed(logout_claims(iss=5))) is None
    assert unverified_issuer("a" * 70_000) is None
