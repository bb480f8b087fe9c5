"""A change and its entry: the entry is durable before the commit, or nothing is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.access.actor import Actor, Role
from gateway.audit.entry import AuditUnavailableError, Entry, NoAudit
from gateway.audit.recorded_change import Change, recorded_change
from gateway.ledger.errors import DatabaseUnavailableError

ENTRY = Entry("key.create", Actor("socket", "", Role.ADMIN), "", "alice", None, {"id": "alice"})


class Log(NoAudit):
    """Records what happens in the order in which it happens. ``is_full``: no entry can be written."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.events: list[object] = []
        self._is_full = is_full

    def record(self, entry: Entry) -> None:
        if self._is_full:
            raise AuditUnavailableError("the disk is full")
        self.events.append(entry)

    def record_refused(self, entry: Entry) -> None:
        self.events.append(entry)


def committing(log: Log, error: Exception | None = None) -> Change[str]:
    async def change(record: Callable[[str], None]) -> str:
        record("done")
        if error is not None:
            raise error
        log.events.append("commit")
        return "done"

    return change


async def test_the_entry_is_before_the_commit() -> None:
    log = Log()
    assert await recorded_change(log, committing(log), lambda _: ENTRY) == "done"
    assert log.events == [ENTRY, "commit"]


async def test_without_a_change_there_is_no_entry() -> None:
    log = Log()
    await recorded_change(log, committing(log), lambda _: None)
    assert log.events == ["commit"]


async def test_without_an_entry_nothing_is_changed() -> None:
    log = Log(is_full=True)
    with pytest.raises(AuditUnavailableError):
        await recorded_change(log, committing(log), lambda _: ENTRY)
    assert log.events == []


async def test_a_change_that_was_not_confirmed_has_another_entry() -> None:
    log = Log()
    with pytest.raises(DatabaseUnavailableError):
        await recorded_change(log, committing(log, DatabaseUnavailableError("cut")), lambda _: ENTRY)
    first, second = log.events
    assert first == ENTRY and isinstance(second, Entry)
    assert (second.action, second.target, second.after) == ("key.create.unconfirmed", "alice", {"reason": "cut"})


async def test_another_error_after_the_entry_is_raised_alone() -> None:
    log = Log()
    with pytest.raises(LookupError):
        await recorded_change(log, committing(log, LookupError("raised")), lambda _: ENTRY)
    assert log.events == [ENTRY]
