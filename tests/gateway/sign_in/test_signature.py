"""Signed values: only what was signed for a purpose is read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.sign_in.oidc.authorization import Attempt, attempts
from gateway.sign_in.signature import MAX_VALUE, Signer, encoded

KEY = b"k" * 32
ATTEMPT = Attempt("one", "https://login.example.com", "data", "state", "/", 1000)
TEXTS = st.text(max_size=50)


@given(TEXTS, TEXTS, st.integers(0, 2**40))
def test_a_signed_value_is_read_unchanged(provider: str, path: str, expires: int) -> None:
    attempt = Attempt(provider, "https://login.example.com", "admin", "state", path, expires)
    assert attempts(KEY).read(attempts(KEY).sign(attempt)) == attempt


@given(st.data())
def test_no_changed_value_is_read(data: st.DataObject) -> None:
    text = attempts(KEY).sign(ATTEMPT)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCxyz019-_.=%é\0"))
    changed = text[:at] + other + text[at + 1 :]
    if changed != text:
        assert attempts(KEY).read(changed) is None


@given(st.text(max_size=200))
def test_arbitrary_text_is_no_value(text: str) -> None:
    assert attempts(KEY).read(text) is None


def test_each_purpose_and_each_key_has_its_own_signature() -> None:
    text = attempts(KEY).sign(ATTEMPT)
    assert Signer(KEY, "session data", Attempt).read(text) is None
    assert attempts(b"K" * 32).read(text) is None


def test_a_value_of_another_type_or_size_is_not_read() -> None:
    assert Signer(KEY, "p", int).read(Signer(KEY, "p", str).sign("text")) is None
    large = Signer(KEY, "p", str).sign("x" * MAX_VALUE)
    assert len(large) > MAX_VALUE and Signer(KEY, "p", str).read(large) is None


def test_derived_secrets_differ_by_use_value_and_key() -> None:
    signer = attempts(KEY)
    derived = [
        signer.derive("nonce", "a"),
        signer.derive("verifier", "a"),
        signer.derive("nonce", "b"),
        attempts(b"K" * 32).derive("nonce", "a"),
    ]
    assert len(set(derived)) == 4
    assert all(len(each) == 43 for each in derived), "the shortest PKCE verifier (RFC 7636, section 4.1)"
    assert encoded(b"\xff\xfe") == "__4"
