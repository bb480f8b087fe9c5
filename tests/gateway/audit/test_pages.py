"""The audit log in pages: the newest entries first, each of them once, from a file and from a table with entries on their way to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from gateway.access.actor import Actor
from gateway.audit.chain import START, Checkpoint, next_line
from gateway.audit.entry import Entry
from gateway.audit.listing import Filter
from gateway.audit.log import Where
from gateway.audit.pages import AuditQuery, audit_page, position
from gateway.audit.table import AuditTable
from gateway.store.cursor import position_of

NOON = datetime(2027, 1, 31, 12, tzinfo=UTC)
COUNT = 1200  # more than a statement and a block have


def written_chain(name: str, count: int = COUNT, step: timedelta = timedelta(seconds=1)) -> list[bytes]:
    """Return the lines of a chain. Each third entry is of ``person ada``."""
    lines, last = [], Checkpoint(name, 0, START)
    for number in range(1, count + 1):
        actor = Actor("person", "ada", None) if number % 3 == 0 else Actor("token", "ci", None)
        entry = Entry("key.change" if number % 2 else "key.create", actor, "127.0.0.1", f"{name}/{number}", None, {"n": number})
        data, last = next_line(last, entry, NOON + number * step, b"key")
        lines.append(data)
    return lines


def pages(where: Where, size: int = 100, target: str | None = None, most_read: int = 20_000, **chosen: Any) -> Iterator[list[str]]:
    """Yield the targets of each page."""
    cursor = ""
    while True:
        page = audit_page(where, AuditQuery(Filter(**chosen), target, size, position(position_of(cursor)), most_read))
        yield [entry["target"] for entry in page["entries"]]
        if page["next_cursor"] is None:
            return
        cursor = page["next_cursor"]


def joined(found: Iterator[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(found))


def file_with(folder: Path, lines: list[bytes], end: bytes = b"") -> Where:
    file = folder / "audit.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in lines) + end)
    return Where(file, folder)


def targets(name: str, count: int = COUNT) -> list[str]:
    return [f"{name}/{number}" for number in range(count, 0, -1)]


@pytest.mark.parametrize("step", [timedelta(seconds=1), timedelta(seconds=-1)])
def test_a_file_is_listed_from_its_end_also_when_the_clock_was_set_back(tmp_path: Path, step: timedelta) -> None:
    where = file_with(tmp_path, written_chain("a", step=step), end=b'{"torn')
    found = list(pages(where))
    assert [each for page in found for each in page] == targets("a") and {len(page) for page in found} <= {100, 0}
    assert next(pages(where, 1)) == [f"a/{COUNT}"]


def test_filters_choose_entries(tmp_path: Path) -> None:
    where = file_with(tmp_path, written_chain("a"))
    assert joined(pages(where, actor="person *")) == [each for each in targets("a") if int(each[2:]) % 3 == 0]
    assert joined(pages(where, action="*.create", target="a/119?")) == [
        "a/1198",
        "a/1196",
        "a/1194",
        "a/1192",
        "a/1190",
    ]
    assert joined(pages(where, since=NOON + timedelta(seconds=COUNT - 1))) == ["a/1200", "a/1199"]
    assert joined(pages(file_with(tmp_path, []))) == []


def test_a_page_reads_a_bounded_number_of_lines(tmp_path: Path) -> None:
    found = list(pages(file_with(tmp_path, written_chain("a")), target="a/1", most_read=500))
    assert found == [[], [], ["a/1"]]


def test_a_table_and_waiting_entries_of_several_chains_are_one_list(tmp_path: Path) -> None:
    first, other = written_chain("a"), written_chain("b", 5)
    with closing(AuditTable(make_url(f"sqlite:///{tmp_path / 'audit.db'}"))) as table:
        table.write(first[:-2])
        table.write(other)
        where = Where(file_with(tmp_path, first[-5:]).file, tmp_path, table)  # three of them are in the table already
        found = joined(pages(where))
    assert [each for each in found if each.startswith("a/")] == targets("a")
    assert found[-10:] == ["b/5", "a/5", "b/4", "a/4", "b/3", "a/3", "b/2", "a/2", "b/1", "a/1"]


@pytest.mark.parametrize(
    "text", ["x", "2027-01-31 a", "2027-01-31 a b", "never a 1", "0001-01-01T00:00+14:00 a 1", f"2027-01-31 a {2**63}"]
)
def test_a_position_that_no_page_has_named_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="next_cursor of an earlier page"):
        position(text)
