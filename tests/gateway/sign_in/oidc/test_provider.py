"""An identity provider's metadata, token responses and logout, good and hostile ones."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sign_in.errors import SignInError
from gateway.sign_in.oidc.provider import (
    Client,
    Metadata,
    end_session_url,
    id_token_of,
    metadata_url,
    parsed_metadata,
    token_request,
)

ISSUER = "https://login.example.com/realms/main"
CLIENT = Client("one", ISSUER, "One", "gate way", "se:cret/+")
GOOD: dict[str, Any] = {
    "issuer": ISSUER,
    "authorization_endpoint": "https://login.example.com/authorize",
    "token_endpoint": "https://login.example.com/token",
    "jwks_uri": "https://keys.example.com/keys",
    "end_session_endpoint": "https://login.example.com/logout?x=1",
    "code_challenge_methods_supported": ["plain", "S256"],
    "unknown": {"more": 1},
}


def metadata(**more: Any) -> Metadata:
    return parsed_metadata(json.dumps(GOOD | more).encode(), ISSUER)


def test_the_metadata_of_an_issuer() -> None:
    assert metadata().end_session_endpoint == "https://login.example.com/logout?x=1"
    assert metadata(code_challenge_methods_supported=None).token_endpoint_auth_methods_supported == ("client_secret_basic",)
    assert metadata_url(ISSUER) == f"{ISSUER}/.well-known/openid-configuration"
    assert metadata_url("https://a.example.com/") == "https://a.example.com/.well-known/openid-configuration"


HOSTILE: dict[str, tuple[dict[str, Any], ...]] = {
    "another issuer": ({"issuer": "https://evil.example.com"}, {"issuer": ISSUER + "/"}, {"issuer": ISSUER.upper()}),
    "no issuer": ({"issuer": 5}, {"issuer": None}, {"issuer": [ISSUER]}),
    "no PKCE": ({"code_challenge_methods_supported": ["plain"]}, {"code_challenge_methods_supported": []}),
    "sign-in without TLS": ({"authorization_endpoint": "http://login.example.com/authorize"},),
    "tokens without TLS": ({"token_endpoint": "http://login.example.com/token"},),
    "keys without TLS": ({"jwks_uri": "http://login.example.com/keys"},),
    "a file": ({"jwks_uri": "file:///etc/passwd"}, {"token_endpoint": "unix:///run/admin.sock"}),
    "a script": ({"authorization_endpoint": "javascript:alert(1)"}, {"end_session_endpoint": "javascript:alert(1)"}),
    "a header": ({"end_session_endpoint": "https://a.example.com/\r\nset-cookie: a=b"},),
    "user information": ({"authorization_endpoint": "https://user:password@login.example.com/"},),
    "a fragment": ({"authorization_endpoint": "https://login.example.com/#fragment"},),
    "no host": ({"token_endpoint": "https:///token"}, {"token_endpoint": "https://[broken/"}),
    "a list": ({"token_endpoint": ["https://login.example.com/token"]},),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_metadata_is_refused(attack: str) -> None:
    for more in HOSTILE[attack]:
        with pytest.raises(SignInError, match="unusable response") as refused:
            metadata(**more)
        assert refused.value.status == 502 and "\n" not in refused.value.detail


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_metadata(document: bytes) -> None:
    with pytest.raises(SignInError):
        parsed_metadata(document, ISSUER)


def test_an_issuer_without_tls_may_have_endpoints_without_tls() -> None:
    plain = "http://localhost:8080"
    found = parsed_metadata(json.dumps(GOOD | {"issuer": plain, "token_endpoint": f"{plain}/token"}).encode(), plain)
    assert found.token_endpoint == "http://localhost:8080/token"


def test_the_client_authenticates_as_the_provider_supports() -> None:
    basic = token_request(CLIENT, metadata(), "co&de", "verifier", "https://llm.example.com/cb")
    pair = base64.b64decode(basic.headers["authorization"].removeprefix("Basic ")).decode()
    assert pair == "gate+way:se%3Acret%2F%2B"
    form = dict(parse_qsl(basic.body.decode()))
    assert form == {
        "grant_type": "authorization_code", "code": "co&de", "code_verifier": "verifier", "redirect_uri": "https://llm.example.com/cb",
    }  # fmt: skip
    post = token_request(CLIENT, metadata(token_endpoint_auth_methods_supported=["client_secret_post"]), "c", "v", "r")
    assert "authorization" not in post.headers and dict(parse_qsl(post.body.decode()))["client_secret"] == "se:cret/+"
    public = token_request(replace(CLIENT, client_secret=None), metadata(), "c", "v", "r")
    assert dict(parse_qsl(public.body.decode()))["client_id"] == "gate way" and "authorization" not in public.headers


def test_secrets_are_not_shown() -> None:
    request = token_request(CLIENT, metadata(), "the-code", "the-verifier", "r")
    assert not any(secret in repr((CLIENT, request)) for secret in ("se:cret", "the-code", "the-verifier", "Basic"))


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (400, b'{"error": "invalid_grant", "error_description": "<b>"}', "has expired or was used before"),
        (401, b'{"error": "invalid_client"}', "unusable response"),
        (200, b'{"access_token": "a"}', "unusable response"),
        (200, b'{"id_token": null}', "unusable response"),
        (200, b"<html>", "unusable response"),
        (302, b"", "unusable response"),
        (500, b'{"error": 5}', "unusable response"),
        (201, b'{"id_token": "a"}', "unusable response"),
    ],
)
def test_a_response_without_an_id_token_is_refused(status: int, body: bytes, text: str) -> None:
    with pytest.raises(SignInError, match=text):
        id_token_of(status, body)


def test_the_id_token_of_a_response() -> None:
    assert id_token_of(200, b'{"id_token": "a.b.c", "access_token": "x"}') == "a.b.c"


def test_the_end_of_the_providers_session() -> None:
    url = end_session_url(CLIENT, metadata(), "a.b.c", "https://llm.example.com/sign-in")
    assert url == (
        "https://login.example.com/logout?x=1&id_token_hint=a.b.c&client_id=gate+way"
        "&post_logout_redirect_uri=https%3A%2F%2Fllm.example.com%2Fsign-in"
    )
    assert "id_token_hint" not in str(end_session_url(CLIENT, metadata(), None, "https://llm.example.com/sign-in"))
    assert end_session_url(CLIENT, metadata(end_session_endpoint=None), None, "r") is None
