"""The tables of people, sessions and sign-in links, in both databases."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select

from gateway.access.actor import Role
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.store import create_database_engine, database_url
from gateway.sign_in.people import EndedSession, NewSession, PeopleStore, SignInLink, digest, person_at
from gateway.sign_in.sessions import Logout, Person, Session, new_session
from gateway.sign_in.tables import PEOPLE, SESSIONS, SIGN_IN_LINKS, USED_ONCE
from tests.support.ports import refusing

ISSUER, NOW = "https://login.example.com", 1_800_000_000.0
ALICE = Person(ISSUER, "one", "alice", "Alice", Role.ADMIN, ("lab",), ("lab",))
BOB = Person(ISSUER, "one", "bob", "Bob", None, ("lab",))
LINK = SignInLink("carol", Role.VIEWER, ("lab", "ops"), ("ops",), "token root", NOW + 900)


@pytest.fixture
def engine(url: str, tmp_path: Path) -> Iterator[Engine]:
    made = create_database_engine(database_url(url, tmp_path))
    yield made
    made.dispose()


@pytest.fixture
def people(engine: Engine) -> PeopleStore:
    return PeopleStore(engine)


def begun(people: PeopleStore, person: Person = ALICE, sid: str | None = "s1", *replaced: str) -> Session:
    session = new_session(person, NOW)
    assert people.sign_in(NewSession(session, "data", NOW + 3600, sid, "an.id.token"), replaced, NOW)
    return session


def logged_out(people: PeopleStore, subject: str | None, sid: str | None, issuer: str = ISSUER, identity: str = "") -> list[EndedSession]:
    return people.log_out(Logout(issuer, identity or secrets.token_hex(8), NOW + 120, subject, sid), 3600, NOW)


def count(engine: Engine, table: object) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()  # type: ignore[arg-type]


def test_a_person_is_stored_once_as_the_last_sign_in_described_them(people: PeopleStore, engine: Engine) -> None:
    begun(people)
    begun(people, Person(ISSUER, "renamed", "alice", "Alice B.", None, ("ops",)))
    begun(people, Person("https://other.example.com", "two", "alice", "Alice", None, ("lab",)))
    with engine.connect() as connection:
        rows = connection.execute(select(PEOPLE).order_by(PEOPLE.c.issuer)).mappings().all()
    assert [(row["issuer"], row["name"], row["role"], row["teams"]) for row in rows] == [
        (ISSUER, "Alice B.", None, ["ops"]),
        ("https://other.example.com", "Alice", None, ["lab"]),
    ]


def test_a_new_session_replaces_the_browsers_earlier_one(people: PeopleStore) -> None:
    first = begun(people)
    second = begun(people, ALICE, "s1", first.id)
    assert people.revoked(NOW) == (first.id,)
    assert people.sign_out([second.id], NOW)[0].id_token == "an.id.token"


def test_a_sign_out_ends_the_sessions_of_the_same_providers_session(people: PeopleStore) -> None:
    one, same, other, bobs = begun(people), begun(people), begun(people, ALICE, "s2"), begun(people, BOB)
    without, unrelated = begun(people, ALICE, None), begun(people, ALICE, None)
    assert {each.id for each in people.sign_out([one.id, without.id], NOW)} == {one.id, same.id, without.id}
    assert {other.id, bobs.id, unrelated.id}.isdisjoint(people.revoked(NOW))
    assert people.sign_out([one.id], NOW) == [], "it was revoked before"
    assert people.sign_out(["unknown"], NOW) == [] and people.sign_out([], NOW) == []


def test_a_logout_ends_the_sessions_that_it_names(people: PeopleStore) -> None:
    one, two, bobs = begun(people), begun(people, ALICE, "s2"), begun(people, BOB, "s3")
    assert logged_out(people, "alice", None, "https://other.example.com") == []
    assert [each.id for each in logged_out(people, None, "s1")] == [one.id]
    assert [each.id for each in logged_out(people, "alice", None)] == [two.id]
    assert bobs.id not in people.revoked(NOW)


def test_a_repeated_logout_revokes_nothing(people: PeopleStore) -> None:
    begun(people)
    assert len(logged_out(people, "alice", None, identity="one")) == 1
    begun(people)
    assert logged_out(people, "alice", None, identity="one") == []
    assert len(logged_out(people, "alice", None, identity="two")) == 1


def test_a_session_that_the_provider_has_ended_cannot_begin(people: PeopleStore) -> None:
    logged_out(people, None, "s1")
    assert not people.sign_in(NewSession(new_session(ALICE, NOW), "data", NOW + 3600, "s1"), (), NOW)
    assert people.sign_in(NewSession(new_session(ALICE, NOW), "data", NOW + 3600, "s2"), (), NOW)


def test_a_value_is_used_once_by_all_gateways_together(people: PeopleStore, engine: Engine) -> None:
    others = [people, *(PeopleStore(engine) for _ in range(3))]
    outcomes: list[bool] = []
    threads = [threading.Thread(target=lambda each=each: outcomes.append(each.use_once(digest("state", "a"), NOW + 60))) for each in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False, False, False, True]
    assert people.use_once(digest("state", "b"), NOW + 60) and people.use_once(digest("logout", "a"), NOW + 60)


def test_a_link_is_used_once_within_its_time(people: PeopleStore) -> None:
    people.add_link("token", LINK, NOW)
    assert people.link("token", NOW) == people.link("token", NOW) == LINK
    assert people.link("token", NOW + 900) is None and people.use_link("token", NOW + 900) is None
    assert people.use_link("Token", NOW) is None
    assert people.use_link("token", NOW) == LINK
    assert people.use_link("token", NOW) is None and people.link("token", NOW) is None


def test_the_token_of_a_link_is_not_stored(people: PeopleStore, engine: Engine) -> None:
    people.add_link("the-token", LINK, NOW)
    with engine.connect() as connection:
        assert "the-token" not in str(connection.execute(select(SIGN_IN_LINKS)).mappings().all())


def test_what_has_expired_is_deleted_and_people_are_retained(people: PeopleStore, engine: Engine) -> None:
    session = begun(people)
    people.sign_out([session.id], NOW)
    people.add_link("token", LINK, NOW)
    people.use_once(b"x", NOW + 900)
    people.prune(NOW + 899)
    assert [count(engine, table) for table in (SESSIONS, SIGN_IN_LINKS, USED_ONCE)] == [1, 1, 1]
    people.prune(NOW + 3600)
    assert [count(engine, table) for table in (SESSIONS, SIGN_IN_LINKS, USED_ONCE, PEOPLE)] == [0, 0, 0, 1]
    assert people.revoked(NOW) == ()


def test_an_expired_session_needs_no_revocation(people: PeopleStore) -> None:
    session = begun(people)
    people.sign_out([session.id], NOW)
    assert people.revoked(NOW + 3599) == (session.id,) and people.revoked(NOW + 3600) == ()


def test_a_database_that_is_away_is_reported(tmp_path: Path) -> None:
    with refusing() as port:
        unreachable = PeopleStore(create_database_engine(database_url(f"postgresql://user@127.0.0.1:{port}/none", tmp_path)))
        for call in (lambda: unreachable.revoked(NOW), lambda: unreachable.use_link("t", NOW), lambda: unreachable.use_once(b"x", NOW)):
            with pytest.raises(DatabaseUnavailableError):
                call()


def test_people_are_listed_in_pages_by_issuer_and_subject(people: PeopleStore) -> None:
    other = Person("https://other.example.com", "two", "alice", "Alice", None, ("ops", 'a"b'), ("ops",))
    for person in (BOB, other, ALICE, ALICE):
        begun(people, person)
    listed = people.people(None, 10, NOW)
    assert [each.identity for each in listed] == [ALICE.identity, BOB.identity, other.identity]
    assert [each.sessions for each in listed] == [2, 1, 1] and people.people(None, 1, NOW + 3600)[0].sessions == 0
    assert (listed[0].role, listed[0].teams, listed[0].owned_teams, listed[0].last_sign_in) == (Role.ADMIN, ("lab",), ("lab",), NOW)
    assert people.people(person_at(listed[0].position), 1, NOW) == listed[1:2]
    assert people.people(person_at(listed[2].position), 10, NOW) == []
    assert people.people(None, 10, NOW, subject="alice") == [listed[0], listed[2]]
    assert people.people(None, 10, NOW, team="lab") == listed[:2]
    assert people.people(None, 10, NOW, team='a"b') == people.people(None, 10, NOW, team="ops") == listed[2:]
    assert people.people(None, 10, NOW, team="la") == people.people(None, 10, NOW, subject="x' OR '1'='1") == []


def test_all_sessions_of_a_person_end(people: PeopleStore) -> None:
    first, second, other = begun(people), begun(people), begun(people, BOB)
    alice, bob = people.people(None, 10, NOW)
    found = people.end_sessions(alice.id, NOW)
    assert found is not None and found[0] == ALICE.identity and {each.id for each in found[1]} == {first.id, second.id}
    assert people.end_sessions(alice.id, NOW) == (ALICE.identity, [])
    assert set(people.revoked(NOW)) == {first.id, second.id} and other.id not in people.revoked(NOW)
    assert people.end_sessions("none", NOW) is None and [each.sessions for each in people.people(None, 10, NOW)] == [0, 1]
    assert bob.sessions == 1


NO_POSITIONS = ["[]", "{}", "1", "[", '["a"]', '["a", 1]', '["a", "b", "c"]', '["a", "b\\u0000"]', '["a", "\\ud800"]', "[" * 10**5]


@pytest.mark.parametrize("position", NO_POSITIONS, ids=range(len(NO_POSITIONS)))
def test_a_position_of_no_person_is_refused(position: str) -> None:
    with pytest.raises(ValueError, match="next_cursor"):
        person_at(position)
    assert person_at("") is None
