"""At a start, a recorded change that was not made is found. A kill between the entry and the commit leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.access.actor import Actor
from gateway.audit.entry import Entry
from gateway.audit.log import AuditLog, Where, running
from gateway.audit.table import AuditTable
from gateway.auth.keys import hash_of
from gateway.control.last_change import check_last_change
from gateway.ledger.store import database_url
from gateway.store.database import KeyDatabase
from tests.support.databases import server, url

__all__ = ["server", "url"]

STARTED = Entry("gateway.start", Actor("gateway", "", None), "host", "", None, None)


@contextmanager
def log(folder: Path, url: str) -> Iterator[AuditLog]:
    state = folder / "state"
    with running(Where(state / "spool.jsonl", state, AuditTable(database_url(url, folder))), b"k" * 32, None, STARTED) as made:
        yield made


def change(action: str, target: str, before: int | None, after: int | None, **more: Any) -> Entry:
    documents: list[Mapping[str, Any] | None] = [None if each is None else {"version": each, **more} for each in (before, after)]
    return Entry(action, Actor("token", "ci", None), "10.0.0.1", target, *documents)


def entry(identity: str) -> str:
    return msgspec.json.encode({"id": identity, "hash": [hash_of(identity)]}).decode()


@pytest.mark.parametrize(
    ("recorded", "was_made"),
    [
        (change("key.create", "alice", None, 1), True),
        (change("key.create", "alice", None, 3), False),  # the number belongs to a change of another entry
        (change("key.create", "carol", None, 4), False),
        (change("key.rotate", "bob", 2, 3), True),
        (change("key.revoke", "alice", 1, 4), False),
        (change("key.delete", "bob", 2, None), True),
        (change("key.delete", "alice", 1, None), False),
        (change("key.import", "2 keys", None, 1, added=["alice", "bob"]), True),
        (change("key.import", "2 keys", None, 4, added=["carol", "dave"]), False),
        (change("team.create", "alice", None, 1), False),
    ],
)
async def test_a_recorded_change_that_was_not_made_gets_an_entry(tmp_path: Path, url: str, recorded: Entry, was_made: bool) -> None:
    with closing(KeyDatabase(database_url(url, tmp_path))) as database:
        for identity in ("alice", "bob"):
            database.change(lambda transaction, identity=identity: transaction.add("key", identity, entry(identity)))  # type: ignore[misc]
        database.change(lambda transaction: transaction.replace("key", transaction.row("key", "bob"), entry("bob")))
        with log(tmp_path, url) as audit:
            audit.record(recorded)
        for _ in range(2):
            with log(tmp_path, url) as audit:
                await check_last_change(audit, database)
    with closing(AuditTable(database_url(url, tmp_path))) as table:
        found = [msgspec.json.decode(line) for _, line in table.read()]
    doubtful = [line for line in found if line["action"].endswith(".unconfirmed")]
    expected = [] if was_made else [(f"{recorded.action}.unconfirmed", recorded.target)]
    assert [(line["action"], line["target"]) for line in doubtful] == expected


async def test_without_a_change_there_is_nothing_to_find(tmp_path: Path, url: str) -> None:
    with closing(KeyDatabase(database_url(url, tmp_path))) as database:
        for _ in range(2):
            with log(tmp_path, url) as audit:
                await check_last_change(audit, database)
    with closing(AuditTable(database_url(url, tmp_path))) as table:
        assert {msgspec.json.decode(line)["action"] for _, line in table.read()} == {"gateway.start", "gateway.stop"}
