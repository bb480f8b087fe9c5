"""The authorization request and its response: bound to one browser, one issuer, one port, one use."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sign_in.errors import SignInError
from gateway.sign_in.oidc.authorization import (
    ATTEMPT_SECONDS,
    Attempt,
    attempts,
    checked_attempt,
    checked_code,
    nonce_of,
    start,
    verifier_of,
)
from gateway.sign_in.oidc.provider import Client, Metadata

KEY, NOW, HERE = b"k" * 32, 1_800_000_000.0, "https://llm.example.com"
SIGNER = attempts(KEY)
CLIENT = Client("one", "https://login.example.com", "One", "gateway", "secret")
METADATA = Metadata(
    CLIENT.issuer, "https://login.example.com/authorize?tenant=1", "https://login.example.com/token", "https://login.example.com/keys"
)
STARTED = start(SIGNER, CLIENT, METADATA, "data", HERE, "/keys", NOW)
REQUEST = dict(parse_qsl(urlsplit(STARTED.url).query))
GOOD = {"code": "c", "state": REQUEST["state"], "iss": CLIENT.issuer}


def checked(query: Any = None, cookie: str | None = STARTED.cookie, provider: str = "one", port: Any = "data", now: float = NOW) -> Attempt:
    query = GOOD if query is None else query
    return checked_attempt(SIGNER, cookie, provider, port, query.items() if isinstance(query, dict) else query, now)


def test_the_request_has_everything_that_binds_its_response() -> None:
    attempt = checked()
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier_of(SIGNER, attempt).encode()).digest()).rstrip(b"=").decode()
    assert {
        "tenant": "1", "response_type": "code", "client_id": "gateway", "redirect_uri": f"{HERE}/sign-in/callback/one",
        "scope": "openid profile email", "state": attempt.state, "nonce": nonce_of(SIGNER, attempt), "code_challenge": challenge,
        "code_challenge_method": "S256",
    } == REQUEST  # fmt: skip
    assert attempt == Attempt("one", CLIENT.issuer, "data", attempt.state, "/keys", int(NOW) + ATTEMPT_SECONDS)
    assert checked_code(attempt, GOOD.items(), needs_issuer=True) == "c"


def test_neither_the_url_nor_the_cookie_reveals_the_verifier() -> None:
    verifier = verifier_of(SIGNER, checked())
    body = base64.urlsafe_b64decode(STARTED.cookie.partition(".")[0] + "==")
    assert verifier not in STARTED.url and verifier.encode() not in body and "secret" not in STARTED.url + STARTED.cookie


def test_two_requests_have_nothing_random_in_common() -> None:
    other = dict(parse_qsl(urlsplit(start(SIGNER, CLIENT, METADATA, "data", HERE, "/keys", NOW).url).query))
    assert all(other[name] != REQUEST[name] for name in ("state", "nonce", "code_challenge"))


OTHER = start(SIGNER, CLIENT, METADATA, "data", HERE, "/", NOW)


@pytest.mark.parametrize(
    "attack",
    [
        {"cookie": None},
        {"cookie": ""},
        {"cookie": OTHER.cookie},
        {"cookie": attempts(b"K" * 32).sign(replace(checked(), return_to="//evil"))},
        {"query": {**GOOD, "state": "guess"}},
        {"query": {"code": "c"}},
        {"query": {**GOOD, "state": ""}},
        {"query": [*GOOD.items(), ("state", GOOD["state"])]},
        {"query": [*GOOD.items(), ("code", "other")]},
        {"query": [*GOOD.items(), ("iss", CLIENT.issuer)]},
        {"query": {**GOOD, "state": GOOD["state"] + "é"}},
        {"provider": "two"},
        {"port": "admin"},
        {"now": NOW + ATTEMPT_SECONDS},
    ],
    ids=[
        "no cookie", "an empty cookie", "the cookie of another attempt", "a forged cookie", "a guessed state", "no state", "an empty state",
        "the state twice", "the code twice", "the issuer twice", "a state that is not ASCII", "the redirect URI of another issuer",
        "the other port", "an attempt that has expired",
    ],
)  # fmt: skip
def test_a_response_that_does_not_belong_to_the_attempt_is_refused(attack: dict[str, Any]) -> None:
    with pytest.raises(SignInError, match="not started in this browser, or has expired"):
        checked(**attack)


@pytest.mark.parametrize(
    ("query", "needs_issuer"),
    [
        ({**GOOD, "iss": "https://evil.example.com"}, False),
        ({**GOOD, "iss": CLIENT.issuer + "/"}, False),
        ({**GOOD, "iss": ""}, False),
        ({"code": "c", "state": GOOD["state"]}, True),
        ({"error": "access_denied", "iss": "https://evil.example.com"}, True),
        ({"state": GOOD["state"], "iss": CLIENT.issuer}, True),
        ({**GOOD, "code": ""}, True),
        ({**GOOD, "code": "x" * 4097}, True),
    ],
    ids=[
        "another issuer", "nearly the issuer", "an empty issuer", "no issuer, which was announced", "an error of another issuer",
        "no code", "an empty code", "a code that is too long",
    ],
)  # fmt: skip
def test_a_response_of_another_issuer_has_no_code(query: dict[str, str], needs_issuer: bool) -> None:
    with pytest.raises(SignInError, match="not started in this browser, or has expired"):
        checked_code(checked(), query.items(), needs_issuer=needs_issuer)


@pytest.mark.parametrize(("error", "text"), [("access_denied", "did not sign you in"), ("<b>x</b>\r\n", "refused the sign-in")])
def test_an_error_of_the_issuer_is_not_shown(error: str, text: str) -> None:
    with pytest.raises(SignInError, match=text) as refused:
        checked_code(checked(), {"error": error, "error_description": "<script>", "iss": CLIENT.issuer}.items(), needs_issuer=True)
    assert "<" not in str(refused.value) and "\n" not in refused.value.detail and "script" not in refused.value.detail


@given(st.lists(st.tuples(st.sampled_from(["code", "state", "iss", "error", "x"]), st.text(max_size=10)), max_size=6))
def test_no_guessed_response_is_accepted(query: list[tuple[str, str]]) -> None:
    with pytest.raises(SignInError):
        checked(query)
