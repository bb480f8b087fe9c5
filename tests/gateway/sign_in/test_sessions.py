"""Session cookies: how long they are valid, for which port, and what ends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.actor import Actor, Role
from gateway.sign_in.browser import Headers
from gateway.sign_in.errors import SignInError
from gateway.sign_in.sessions import LINK_ISSUER, Person, Session, Sessions, new_session
from gateway.snapshot.snapshot import SessionRules

ISSUER, NOW = "https://login.example.com", 1_800_000_000.0
RULES = SessionRules(b"k" * 32, True, 3600.0, 86_400.0, (LINK_ISSUER, ISSUER))
ALICE = Person(ISSUER, "login", "alice", "Alice", Role.OPERATOR, ("lab", "ops"), ("lab",))


def sessions(revoked: tuple[str, ...] | None = (), **more: Any) -> Sessions:
    return Sessions(replace(RULES, **more), "data", revoked)


def sent(written: str) -> Headers:
    return [(b"cookie", written.partition(";")[0].encode())]


def test_a_session_is_read_as_it_was_written() -> None:
    session = new_session(ALICE, NOW)
    written = sessions().write(session)
    assert sessions().read(sent(written), NOW) == session
    assert written.startswith("__Host-vllm-gateway-session=") and written.endswith("; Max-Age=86400; HttpOnly; SameSite=Lax; Secure")
    assert len(session.id) == 22 and new_session(ALICE, NOW).id != session.id


@given(st.integers(-7200, 2 * 86_400), st.integers(0, 86_400))
def test_a_session_is_valid_within_the_idle_time_and_the_lifetime(after: int, seen: int) -> None:
    session = replace(new_session(ALICE, NOW), seen=int(NOW) + seen)
    valid = sessions().read(sent(sessions().write(session)), NOW + after) is not None
    assert valid == (seen - 60 <= after < min(seen + 3600, 86_400) and after >= -60)


def test_use_extends_a_session_but_not_beyond_its_lifetime() -> None:
    session = new_session(ALICE, NOW)
    assert sessions().renewal(session, NOW + 359) == {}
    at = NOW
    while (found := sessions().read(sent(sessions().write(session)), at + 3000)) is not None:
        at += 3000
        renewed = sessions().read(sent(sessions().renewal(found, at)["set-cookie"]), at)
        assert renewed is not None
        session = renewed
    assert NOW + 86_400 - 3000 <= at < NOW + 86_400


def test_a_shorter_lifetime_ends_older_sessions() -> None:
    written = sent(sessions().write(new_session(ALICE, NOW)))
    assert sessions().read(written, NOW + 1000) is not None
    assert sessions(lifetime=900.0).read(written, NOW + 1000) is None


@pytest.mark.parametrize(
    "other",
    [
        Sessions(RULES, "admin", ()),
        sessions(key=b"K" * 32),
        sessions(secure=False),
        sessions(issuers=(LINK_ISSUER,)),
        sessions(revoked=None),
    ],
    ids=["the other port", "another key", "without TLS", "an issuer that was removed", "unknown revocations"],
)
def test_a_session_is_not_valid_elsewhere(other: Sessions) -> None:
    """The cookie is sent under the name that each one reads."""
    value = sessions().write(new_session(ALICE, NOW)).partition(";")[0].partition("=")[2]
    assert sessions().read([(b"cookie", f"{sessions().cookie}={value}".encode())], NOW) is not None
    read = other.read([(b"cookie", f"{other.cookie}={value}".encode())], NOW)
    assert read is None or other.cookie == "vllm-gateway-session"


def test_a_revoked_session_is_not_valid_after_a_renewal_either() -> None:
    session = new_session(ALICE, NOW)
    renewed = sessions().renewal(session, NOW + 1000)["set-cookie"]
    ended = sessions(revoked=("other", session.id))
    assert ended.read(sent(renewed), NOW + 1000) is None
    assert ended.read(sent(sessions().write(new_session(ALICE, NOW))), NOW) is not None


def test_a_session_of_the_admin_port_has_another_cookie() -> None:
    data, admin = sessions(), Sessions(RULES, "admin", ())
    session = new_session(ALICE, NOW)
    both = [*sent(data.write(session)), *sent(admin.write(session))]
    assert data.read(both, NOW) == admin.read(both, NOW) == session
    assert data.read(sent(admin.write(session)), NOW) is None


def test_a_cookie_of_a_neighboring_host_is_not_read() -> None:
    """With TLS only a cookie with ``__Host-`` counts, which no other host of the domain and no page without TLS can set."""
    value = sessions().write(new_session(ALICE, NOW)).partition(";")[0].partition("=")[2]
    for name in ("vllm-gateway-session", "__Secure-vllm-gateway-session", "__host-vllm-gateway-session", "__Host-vllm-gateway-session "):
        read = sessions().read([(b"cookie", f"{name}={value}".encode())], NOW)
        assert (read is not None) == (name.strip() == sessions().cookie)


def test_parts_of_two_sessions_make_no_session() -> None:
    """A person puts the content of an admin's session before the own signature, cuts a cookie, or adds to it."""
    alice, bob = (sessions().write(new_session(each, NOW)) for each in (ALICE, replace(ALICE, subject="bob", role=Role.ADMIN)))
    (body, mac), (body_of_bob, _) = (each.partition(";")[0].partition("=")[2].split(".") for each in (alice, bob))
    for value in (f"{body_of_bob}.{mac}", f"{body}.", body, f"{body}.{mac[:-1]}", f"{body[:-2]}.{mac}", f"{body}.{mac}.{mac}", f".{mac}"):
        assert sessions().read([(b"cookie", f"{sessions().cookie}={value}".encode())], NOW) is None
    assert sessions().read([(b"cookie", f"{sessions().cookie}={body}.{mac}".encode())], NOW) is not None


@given(st.text(max_size=300))
def test_no_arbitrary_cookie_is_a_session(text: str) -> None:
    assert sessions().read([(b"cookie", f"{sessions().cookie}={text}".encode())], NOW) is None


def test_a_session_that_is_too_large_for_a_cookie_is_refused() -> None:
    many = replace(ALICE, teams=tuple(f"team-{number:0200}" for number in range(50)))
    with pytest.raises(SignInError, match="too many teams"):
        sessions().write(new_session(many, NOW))


def test_the_actor_of_a_person_is_unique_and_owns_its_teams() -> None:
    assert ALICE.actor == Actor("person", "login:alice", Role.OPERATOR, frozenset({"lab"}))
    linked = replace(ALICE, issuer=LINK_ISSUER, provider="link")
    assert linked.actor.name != ALICE.actor.name


def test_the_secret_key_is_not_shown() -> None:
    assert "kkkk" not in repr(RULES)
    assert Session("i", ALICE, 1, 1) == Session("i", ALICE, 1, 1)
