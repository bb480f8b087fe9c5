"""Changes of keys and teams, in both databases."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.access.actor import PersonId
from gateway.auth.keys import hash_of
from gateway.key_management.raises import Raise, encode
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.store import database_url
from gateway.store.database import KeyDatabase, Transaction
from gateway.store.decisions import Named
from gateway.store.entries import Position, Repeatable
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.self_service import Grant
from gateway.store.service import KeyService
from tests.support.ports import refusing
from tests.support.postgres import Postgres
from tests.support.process import wait_for

NAMED = Named(keys={"yaml"}, hashes={hash_of("sk-of-the-yaml")}, teams={"lab"}, models={"qwen"}, has_prices=True)


@pytest.fixture
def service(database: KeyDatabase) -> KeyService:
    return KeyService(database, lambda: NAMED)


def ids(rows: Any) -> list[str]:
    return [row.id for row in rows]


def test_a_key_lives(service: KeyService, database: KeyDatabase) -> None:
    service.create_team({"id": "ops", "limits": {"concurrent": 3}})
    made = service.create_key({"id": "alice", "team": "ops", "name": "Alice"})
    assert made.secret is not None and [one.text for one in made.after.key.hashes] == [hash_of(made.secret)]
    changed = service.change_key("alice", {"limits": {"cost_per_day": 1.5}}, made.after.version)
    rotated = service.rotate_key("alice", 60.0, changed.after.version)
    assert rotated.secret not in (None, made.secret) and len(rotated.after.key.hashes) == 2
    revoked = service.revoke_key("alice", None, revoked=True)
    restored = service.revoke_key("alice", None, revoked=False)
    assert (revoked.after.key.revoked, restored.after.key.revoked) == (True, False)
    assert restored.after.key == rotated.after.key and restored.after.name == "Alice"
    versions = [each.after.version for each in (made, changed, rotated, revoked, restored)]
    assert versions == sorted(set(versions))
    stored = database.find("key", "alice")
    assert stored is not None and stored.created == made.after.created and stored.changed > stored.created
    assert not any(secret in stored.entry for secret in (made.secret, rotated.secret) if secret)
    service.delete_key("alice", restored.after.version)
    assert database.find("key", "alice") is None


def test_raises_are_changes_of_their_holder(service: KeyService, database: KeyDatabase) -> None:
    made, later = service.create_key({"id": "alice"}).after, time.time() + 3600
    first, other = Raise("concurrent", later, 0.0, "ci", "2"), Raise("max_tokens", later, 0.0, "ci", None, 7)
    position = database.changes_since(None).position
    assert service.change_raises(("key", "alice"), lambda before: (*before, first)) == ((), (first,))
    assert service.change_raises(("key", "alice"), lambda before: (*before, other)) == ((first,), (first, other))
    assert service.change_raises(("team", "of-the-yaml"), lambda _: (first,)) == ((), (first,))
    changes = database.changes_since(position)
    assert (list(changes.keys.entries), list(changes.teams.removed)) == (["alice"], ["of-the-yaml"])
    stored = {("key", "alice"): encode([first, other]), ("team", "of-the-yaml"): encode([first])}
    assert changes.raises == database.changes_since(None).raises == stored
    assert service.change_key("alice", {"priority": 1}, made.version).after.key.priority == 1  # a raise is no change of the entry

    ended = Raise("concurrent", 1.0, 0.0, "ci", "2")
    assert service.change_raises(("team", "of-the-yaml"), lambda _: (ended,)) == ((first,), (ended,))
    assert database.changes_since(None).raises == {("key", "alice"): stored["key", "alice"]}
    assert database.changes_since(changes.position).raises == {("key", "alice"): stored["key", "alice"]}
    service.delete_key("alice", None)
    assert database.changes_since(None).raises == {}

    def refuse(_: tuple[Raise, ...]) -> tuple[Raise, ...]:
        raise LookupError

    position = database.changes_since(None).position
    with pytest.raises(LookupError):
        service.change_raises(("key", "alice"), refuse)
    assert database.changes_since(None).position == position


def test_a_change_without_an_effect_is_no_change(service: KeyService, database: KeyDatabase) -> None:
    made = service.create_key({"id": "alice"})
    position = database.changes_since(None).position
    assert service.change_key("alice", {"team": None}, None).after == made.after
    assert database.changes_since(None).position == position


def test_a_change_of_another_version_is_refused(service: KeyService) -> None:
    made = service.create_key({"id": "alice"}).after
    service.change_key("alice", {"priority": 1}, made.version)
    changes: list[Callable[[], object]] = [
        lambda: service.change_key("alice", {"priority": 2}, made.version),
        lambda: service.rotate_key("alice", 60.0, made.version),
        lambda: service.revoke_key("alice", made.version, revoked=True),
        lambda: service.delete_key("alice", made.version),
    ]
    for change in changes:
        with pytest.raises(RefusedChangeError) as refused:
            change()
        assert refused.value.reason is Reason.CHANGED


def test_a_key_that_is_made_again_has_another_version(service: KeyService) -> None:
    first = service.create_key({"id": "alice"}).after
    service.delete_key("alice", None)
    assert service.create_key({"id": "alice"}).after.version > first.version


def test_an_id_and_a_hash_belong_to_one_key(service: KeyService, database: KeyDatabase) -> None:
    made = service.create_key({"id": "alice"})
    with pytest.raises(RefusedChangeError, match="there is a key alice in the store already"):
        service.create_key({"id": "alice"})
    assert made.secret is not None
    with pytest.raises(RefusedChangeError, match="another key of the store has this hash"):
        database.change(lambda transaction: transaction.add("key", "bob", json.dumps({"id": "bob", "hash": [hash_of(made.secret or "")]})))
    assert ids(database.page("key", "", 10)) == ["alice"]
    service.delete_key("alice", None)
    assert service.import_keys(f"id,key\nbob,{made.secret}").added[0].key.id == "bob"


def test_a_team_with_keys_is_not_deleted(service: KeyService) -> None:
    service.create_team({"id": "ops"})
    service.create_key({"id": "alice", "team": "ops"})
    with pytest.raises(RefusedChangeError, match="the key alice belongs to ops"):
        service.delete_team("ops", None)
    service.change_key("alice", {"team": "lab"}, None)
    assert service.delete_team("ops", None).team.id == "ops"
    with pytest.raises(RefusedChangeError, match="there is no team ops in the store"):
        service.change_team("ops", {}, None)


def test_a_request_with_an_idempotency_key_is_run_once(service: KeyService, database: KeyDatabase) -> None:
    once = Repeatable("first", "digest")
    made, repeated = (service.create_key({"id": "alice"}, once) for _ in range(2))
    assert (made.is_repeated, repeated.is_repeated, repeated.secret, repeated.after) == (False, True, None, made.after)
    again = Repeatable("second", "digest")
    rotated, repeated = (service.rotate_key("alice", 60.0, None, again) for _ in range(2))
    assert repeated.is_repeated and len(repeated.after.key.hashes) == 2 == len(rotated.after.key.hashes)
    with pytest.raises(RefusedChangeError) as refused:
        service.create_key({"id": "bob"}, Repeatable("first", "another digest"))
    assert refused.value.reason is Reason.OTHER_REQUEST
    assert ids(database.page("key", "", 10)) == ["alice"]


def test_a_refused_request_is_not_remembered(service: KeyService) -> None:
    once = Repeatable("first", "digest")
    for _ in range(2):
        with pytest.raises(RefusedChangeError, match="yaml is a key of the configuration"):
            service.create_key({"id": "yaml"}, once)


def test_litellms_export_is_imported_at_once_or_not_at_all(service: KeyService, database: KeyDatabase) -> None:
    service.create_team({"id": "ops"})
    token = "a" * 64
    listed = [
        {
            "token": token,
            "key_alias": "one",
            "team_id": "ops",
            "models": ["qwen"],
            "rpm_limit": 5,
            "max_budget": 2,
            "budget_duration": "1d",
        },
        {"token": "b" * 64, "key_alias": "two", "team_id": "unknown", "blocked": True},
    ]
    done = service.import_keys(json.dumps({"keys": listed}))
    assert [stored.key.id for stored in done.added] == ["one", "two"]
    assert done.messages == ("key 2 (two): left out: team_id (the configuration has no such team)",)
    one, two = done.added
    assert one.key.limits is not None and (one.key.team, one.key.limits.requests_per_minute, two.key.revoked) == ("ops", 5, True)
    again = service.import_keys(json.dumps({"keys": [*listed, {"token": hash_of("sk-of-the-yaml")[7:]}]}))
    assert (again.added, again.known) == ([], 3)
    with pytest.raises(RefusedChangeError, match=r"key 2 \(yaml\): the configuration has another key with this id"):
        service.import_keys(json.dumps([{"token": "c" * 64, "key_alias": "new"}, {"token": "d" * 64, "key_alias": "yaml"}]))
    assert ids(database.page("key", "", 10)) == ["one", "two"]


def test_pages_contain_each_key_once(service: KeyService, database: KeyDatabase) -> None:
    service.create_team({"id": "ops"})
    for number in range(7):
        service.create_key({"id": f"key-{number}", "team": "ops" if number % 2 else None})
    first = database.page("key", "", 3)
    assert ids(first) == ["key-0", "key-1", "key-2"]
    assert ids(database.page("key", first[-1].id, 10)) == ["key-3", "key-4", "key-5", "key-6"]
    assert ids(database.page("key", "key-1", 10, teams=("ops",))) == ["key-3", "key-5"]


def test_a_search_finds_ids_names_and_teams_in_bounded_steps(
    service: KeyService, database: KeyDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.create_team({"id": "ops"})
    for number in range(6):
        service.create_key({"id": f"key-{number}", "team": "ops" if number == 1 else None, "name": f"Möbius 100% {number}"})
    service.create_key({"id": "plain_one", "limits": {"concurrent": 1}})

    def found(text: str, **more: Any) -> list[str]:
        return ids(database.search("key", text, "", 10, **more).rows)

    assert found("KEY-") == [f"key-{number}" for number in range(6)]
    assert (found("bius 100% 3"), found("Möbius 100% 3"), found("Ops"), found("plain_")) == (["key-3"], ["key-3"], ["key-1"], ["plain_one"])
    assert found("%%") == found("concurrent") == found("sha256") == found("nothing") == []  # neither a pattern nor another setting
    assert found("key", teams=("ops",)) == ["key-1"] and ids(database.search("team", "OP", "", 10).rows) == ["ops"]
    assert database.search("key", "key", "", 2) == (database.page("key", "", 2), None)

    monkeypatch.setattr("gateway.store.database.SEARCHED", 4)
    first = database.search("key", "key-5", "", 10)
    assert (first.rows, first.last) == ([], "key-3")
    second = database.search("key", "key-5", "key-3", 10)
    assert (ids(second.rows), second.last) == (["key-5"], None)


# The change log


def test_changes_lead_on_from_a_position(service: KeyService, database: KeyDatabase) -> None:
    assert database.changes_since(None).is_complete
    service.create_key({"id": "alice"})
    service.create_team({"id": "ops"})
    start = database.changes_since(None)
    assert (list(start.keys.entries), list(start.teams.entries), start.is_complete) == (["alice"], ["ops"], True)
    same = database.changes_since(start.position)
    assert (same.position, same.keys, same.teams, same.is_complete) == (start.position, ({}, []), ({}, []), False)
    service.create_key({"id": "bob"})
    service.create_key({"id": "carol"})
    service.revoke_key("bob", None, revoked=True)
    service.delete_key("carol", None)
    service.delete_team("ops", None)
    later = database.changes_since(start.position)
    assert (list(later.keys.entries), later.keys.removed, later.teams, later.is_complete) == (["bob"], ["carol"], ({}, ["ops"]), False)
    assert '"revoked": true' in later.keys.entries["bob"]


def test_an_empty_database_is_a_position_too(service: KeyService, database: KeyDatabase) -> None:
    empty = database.changes_since(None)
    assert (empty.position, empty.is_complete) == (Position(), True)
    assert not database.changes_since(Position()).is_complete
    service.create_key({"id": "alice"})
    first = database.changes_since(Position())
    assert (list(first.keys.entries), first.is_complete, first.position.seq) == (["alice"], False, 1)


def test_a_database_that_lost_changes_is_read_completely(service: KeyService, database: KeyDatabase) -> None:
    service.create_key({"id": "alice"})
    last = database.changes_since(None).position
    service.create_key({"id": "bob"})
    assert not database.changes_since(last).is_complete
    assert database.changes_since(Position(last.seq, "of another history")).is_complete
    assert database.changes_since(Position(last.seq + 100, last.mark)).is_complete


def test_changes_of_several_gateways_have_one_order(service: KeyService, database: KeyDatabase) -> None:
    """No reader sees a number before a smaller one. So a reader that always reads on from its last row misses none."""
    seen: set[str] = set()
    done = threading.Event()

    def change(worker: int) -> None:
        with closing(KeyDatabase(database.engine.url)) as own:
            made = KeyService(own, lambda: NAMED)
            for number in range(10):
                made.create_key({"id": f"{worker}-{number}"})

    def read() -> None:
        position = database.changes_since(None).position
        while True:
            is_last = done.is_set()
            changes = database.changes_since(position)
            assert not changes.is_complete
            seen.update(changes.keys.entries)
            position = changes.position
            if is_last:
                return

    service.create_key({"id": "first"})
    writers = [threading.Thread(target=change, args=(worker,)) for worker in range(3)]
    reader = threading.Thread(target=read)
    for each in (reader, *writers):
        each.start()
    for each in writers:
        each.join(60)
    done.set()
    reader.join(60)
    assert sorted(seen - {"first"}) == sorted(f"{worker}-{number}" for worker in range(3) for number in range(10))


def test_two_changes_at_once_cannot_both_have_read_the_same_version(service: KeyService, database: KeyDatabase) -> None:
    made = service.create_key({"id": "alice"}).after
    outcomes: list[str] = []

    def change(number: int) -> None:
        with closing(KeyDatabase(database.engine.url)) as own:
            try:
                KeyService(own, lambda: NAMED).change_key("alice", {"priority": number}, made.version)
                outcomes.append("changed")
            except RefusedChangeError as error:
                outcomes.append(error.reason.name)

    threads = [threading.Thread(target=change, args=(number + 1,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(outcomes) == ["CHANGED", "CHANGED", "CHANGED", "changed"]


def test_a_gateway_that_hangs_during_a_change_blocks_the_others_for_seconds(server: Postgres, tmp_path: Path) -> None:
    url, begun, finish, failed = database_url(server.database(), tmp_path), threading.Event(), threading.Event(), list[str]()
    with closing(KeyDatabase(url)) as hanging, closing(KeyDatabase(url)) as other:

        def work(transaction: Transaction) -> None:
            transaction.add("team", "half", '{"id": "half"}')
            begun.set()
            finish.wait(120)

        def change() -> None:
            try:
                hanging.change(work)
            except DatabaseUnavailableError as error:
                failed.append(str(error))

        def is_changed() -> bool:
            try:
                KeyService(other, lambda: NAMED).create_team({"id": "ops"})
            except DatabaseUnavailableError:
                return False
            return True

        thread = threading.Thread(target=change)
        thread.start()
        assert begun.wait(60)
        wait_for(is_changed, 60)
        finish.set()
        thread.join(60)
        assert failed and other.find("team", "half") is None


def test_a_change_that_fails_leaves_nothing(service: KeyService, database: KeyDatabase) -> None:
    service.create_key({"id": "alice"})

    def work(transaction: Transaction) -> None:
        transaction.add("team", "half", '{"id": "half"}')
        raise RefusedChangeError(Reason.CONFLICT, "no")

    position = database.changes_since(None).position
    with pytest.raises(RefusedChangeError):
        database.change(work)
    assert database.find("team", "half") is None
    assert database.changes_since(None).position == position


def test_a_database_that_does_not_respond() -> None:
    with (
        refusing() as port,
        closing(KeyDatabase(database_url(f"postgresql://postgres@127.0.0.1:{port}/none", Path()))) as unreachable,
    ):
        with pytest.raises(DatabaseUnavailableError):
            KeyService(unreachable, lambda: NAMED).create_key({"id": "alice"})
        with pytest.raises(DatabaseUnavailableError):
            unreachable.changes_since(None)


ALICE, BOB = PersonId("https://login.example.com", "alice"), PersonId("", "alice")


def test_the_maker_of_a_key_survives_its_changes(service: KeyService, database: KeyDatabase) -> None:
    service.create_team({"id": "ops", "self_service": {"max_keys": 2, "max_lifetime": "90d"}})
    grant = Grant(ALICE, {"ops"})
    made = service.create_own_key(ALICE, grant, {"team": "ops", "name": "Laptop"})
    identity = made.after.key.id
    service.create_key({"id": "robot", "team": "ops"})
    service.create_own_key(BOB, Grant(BOB, {"ops"}), {"team": "ops"})
    assert service.change_key(identity, {"name": "Desktop"}, None, grant).after.made_by == ALICE
    assert service.rotate_key(identity, 60.0, None, None, grant).after.made_by == ALICE
    assert service.revoke_key(identity, None, revoked=True).after.made_by == ALICE
    assert [row.id for row in database.page("key", "", 10, made_by=ALICE)] == [row.id for row in database.made_by(ALICE)] == [identity]
    assert len(database.page("key", "", 10, teams=["ops"])) == 3 and len(database.made_by(BOB)) == 1
    assert database.find("key", "robot").made_by is None  # type: ignore[union-attr]
    assert database.made_by(PersonId("https://login.example.com", "")) == []
    service.delete_key(identity, None, grant)
    assert database.made_by(ALICE) == []


def test_two_creations_at_the_ceiling_race(service: KeyService, database: KeyDatabase) -> None:
    service.create_team({"id": "ops", "self_service": {"max_keys": 1}})
    results: list[str] = []

    def create() -> None:
        try:
            service.create_own_key(ALICE, Grant(ALICE, {"ops"}), {"team": "ops"})
            results.append("created")
        except RefusedChangeError as error:
            results.append(error.reason.name)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["CONFLICT"] * 3 + ["created"]
    assert len(database.made_by(ALICE)) == 1


def test_a_repeated_request_of_a_person_shows_only_a_key_within_reach(service: KeyService) -> None:
    service.create_team({"id": "ops", "self_service": {"max_keys": 2}})
    grant, repeatable = Grant(ALICE, {"ops"}), Repeatable.of("once", "POST", "/keys", b"{}", ALICE)
    first = service.create_own_key(ALICE, grant, {"team": "ops"}, repeatable)
    again = service.create_own_key(ALICE, grant, {"team": "ops"}, repeatable)
    assert (again.after, again.secret, again.is_repeated) == (first.after, None, True)
    with pytest.raises(RefusedChangeError) as refused:
        service.create_own_key(ALICE, Grant(BOB, {"ops"}), {"team": "ops"}, repeatable)
    assert refused.value.reason is Reason.NOT_FOUND
    assert Repeatable.of("once", "POST", "/keys", b"{}", BOB) != repeatable
