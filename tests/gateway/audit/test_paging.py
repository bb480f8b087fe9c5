"""The audit log in pages: the newest entries first, each of them once, from a file and from a table with entries on their way to it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.event import listen

from gateway.access.actor import Actor
from gateway.audit.chain import START, Checkpoint, Line, next_line, read_line
from gateway.audit.entry import Entry
from gateway.audit.listing import Filter
from gateway.audit.log import Where
from gateway.audit.paging import AuditQuery, audit_page, position
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


MANY = 100_000


def next_page(where: Where, after: bytes, start: int = 0) -> list[str]:
    """Return the targets of the page after a line."""
    line = read_line(after)
    assert line is not None
    page = audit_page(where, AuditQuery(Filter(), None, 100, (line.time, line.chain, line.seq, start)))
    return [entry["target"] for entry in page["entries"]]


def test_a_deep_page_of_a_file_reads_no_newer_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a separate call, so what one has read helps no other."""
    lines = written_chain("a", MANY)
    where, parsed = file_with(tmp_path, lines), 0

    def counted(data: bytes) -> Line | None:
        nonlocal parsed
        parsed += 1
        return read_line(data)

    monkeypatch.setattr("gateway.audit.paging.read_line", counted)
    start = where.file.read_bytes().index(lines[499])
    before = int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])
    assert next_page(where, lines[499], start) == targets("a", 499)[:100]
    after = int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])
    assert parsed <= 102 and after - before < where.file.stat().st_size // 20


def test_a_deep_page_of_a_table_costs_as_much_as_the_first(tmp_path: Path) -> None:
    """SQLite reports every hundred instructions of its machine."""
    lines, steps = written_chain("a", MANY), 0

    def count() -> None:
        nonlocal steps
        steps += 1

    with closing(AuditTable(make_url(f"sqlite:///{tmp_path / 'audit.db'}"))) as table:
        table.write(lines)
        where, costs = Where(file_with(tmp_path, []).file, tmp_path, table), []
        listen(table.engine, "checkout", lambda connection, *_: connection.set_progress_handler(count, 100))
        for number in (MANY, 500):
            steps = 0
            assert next_page(where, lines[number - 1])[:2] == [f"a/{number - 1}", f"a/{number - 2}"]
            costs.append(steps)
    assert 0 < costs[1] < 2 * costs[0]


def test_a_cursor_of_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    lines = written_chain("a")
    page = audit_page(file_with(tmp_path, lines), AuditQuery(Filter(), None, 100))
    for replaced in (lines[:100], lines[1100:]):
        query = AuditQuery(Filter(), None, 100, position(position_of(page["next_cursor"])))
        where = file_with(tmp_path, replaced)
        with pytest.raises(ValueError, match="moved or replaced"):
            audit_page(where, query)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "2027-01-31 a 1",
        "2027-01-31 a b 0",
        "2027-01-31 a 1 x",
        "2027-01-31 a 1 -1",
        "never a 1 0",
        "0001-01-01T00:00+14:00 a 1 0",
        f"2027-01-31 a {2**63} 0",
    ],
)
def test_a_position_that_no_page_has_named_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="next_cursor of an earlier page"):
        position(text)
