"""The table of notices: one row for each ID in all gateways, and one gateway at a time that sends it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.store import database_url
from gateway.notices.notice import Notice
from gateway.notices.table import CLAIM, NoticeTable
from tests.support.ports import refusing

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def notice(number: int, rule: str = "ops", end: datetime = NOW + timedelta(hours=12)) -> Notice:
    return Notice(f"notice_{number}", rule, "budget.threshold", "key alice", f"text {number}", {"used": number}, end.timestamp())


@pytest.fixture
def tables(url: str, tmp_path: Path) -> Iterator[tuple[NoticeTable, NoticeTable]]:
    """The table as two gateways see it."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(closing(NoticeTable(database_url(url, tmp_path)))) for _ in range(2))
        yield one, other


def test_a_notice_has_one_row(tables: tuple[NoticeTable, NoticeTable]) -> None:
    one, other = tables
    one.add([notice(1), notice(2)], NOW)
    other.add([notice(2), notice(3)], NOW + SECOND)
    assert [row.id for row in one.recent(10)] == ["notice_3", "notice_1", "notice_2"]
    assert [(row.created, row.state, row.attempts, row.result) for row in one.recent(10)[1:]] == [(NOW, "waiting", 0, "")] * 2
    assert [row.id for row in other.recent(1)] == ["notice_3"]
    assert one.waiting()["ops"] == (3, NOW)


def test_one_gateway_at_a_time_sends_a_notice(tables: tuple[NoticeTable, NoticeTable]) -> None:
    one, other = tables
    one.add([notice(1)], NOW)
    (row,), (same,) = (table.due("ops", NOW, 10) for table in tables)
    assert (one.claim(row, NOW), other.claim(same, NOW)) == (True, False)
    assert other.due("ops", NOW + CLAIM - SECOND, 10) == []
    (again,) = other.due("ops", NOW + CLAIM, 10)
    assert other.claim(again, NOW + CLAIM)
    other.finish(again, "sent", "status 200")
    one.retry(row, NOW, "status 500")  # its claim has expired long ago
    one.finish(row, "failed", "status 500")
    assert [(each.state, each.result, each.attempts) for each in one.recent(10)] == [("sent", "status 200", 2)]
    assert one.waiting() == {}


def test_a_failed_attempt_is_due_again_at_its_time(tables: tuple[NoticeTable, NoticeTable]) -> None:
    one, other = tables
    one.add([notice(1), notice(2, "mail")], NOW)
    (row,) = one.due("ops", NOW, 10)
    assert one.claim(row, NOW)
    one.retry(row, NOW + 5 * SECOND, "status 503")
    assert other.due("ops", NOW + 4 * SECOND, 10) == []
    assert [(each.id, each.attempts, each.result) for each in other.due("ops", NOW + 5 * SECOND, 10)] == [("notice_1", 1, "status 503")]
    assert [each.id for each in other.due("mail", NOW, 10)] == ["notice_2"]


def test_rows_are_deleted_long_after_their_window(tables: tuple[NoticeTable, NoticeTable]) -> None:
    one, _ = tables
    one.add([notice(1, end=NOW), notice(2)], NOW)
    one.prune(NOW + timedelta(days=7))
    assert len(one.recent(10)) == 2
    one.prune(NOW + timedelta(days=7, seconds=1))
    assert [row.id for row in one.recent(10)] == ["notice_2"]


def test_a_separate_file_is_private(tmp_path: Path) -> None:
    file = tmp_path / "state" / "notices" / "one.db"
    with closing(NoticeTable(database_url(f"sqlite:///{file}", tmp_path))) as table:
        table.add([notice(1)], NOW)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_database_that_does_not_respond(tmp_path: Path) -> None:
    with refusing() as port, closing(NoticeTable(database_url(f"postgresql://nobody@127.0.0.1:{port}/none", tmp_path))) as table:
        for call in (lambda: table.add([notice(1)], NOW), lambda: table.due("ops", NOW, 1), table.waiting, lambda: table.prune(NOW)):
            with pytest.raises(DatabaseUnavailableError):
                call()
