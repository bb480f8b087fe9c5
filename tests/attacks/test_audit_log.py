"""An attacker with all rights on the file or the database of the audit log, but without its key, rewrites it.

The attacker also renumbers entries, so that only the HMAC shows it. The signed checkpoint is where the attacker does not reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert

from gateway.audit.chain import START, Checkpoint, next_line, read_line
from gateway.audit.entry import Entry
from gateway.audit.lines import file_lines
from gateway.audit.table import AUDIT, AuditTable
from gateway.ledger.store import create_database_engine, database_url
from tests.gateway.audit.test_log import CHANGE, log, verified

CHANGES = 8
WHOLE = CHANGES + 2
"""Entries, with those of the start and the end."""
_SEQ = re.compile(rb'"seq":\d+')
_DROPS = {
    "sqlite": ("DROP TRIGGER gateway_audit_no_update", "DROP TRIGGER gateway_audit_no_delete"),
    "postgresql": ("DROP TRIGGER gateway_audit_append_only ON gateway_audit",),
}


def renumbered(lines: Sequence[bytes]) -> list[bytes]:
    return [_SEQ.sub(b'"seq":%d' % number, line, count=1) for number, line in enumerate(lines, 1)]


def computed_again(lines: Sequence[bytes]) -> list[bytes]:
    """Compute the whole chain with another key, with one entry changed."""
    first = read_line(lines[0])
    assert first is not None
    made, checkpoint = [], Checkpoint(first.chain, 0, START)
    for line in lines:
        read = read_line(line)
        assert read is not None
        entry = Entry(read.action, CHANGE.actor, "10.9.9.9", read.target, read.before, read.after)
        again, checkpoint = next_line(checkpoint, entry, read.time, b"a guess of the secret's key.......")
        made.append(again)
    return made


Tampering = Callable[[list[bytes]], list[bytes]]
TAMPERING: dict[str, tuple[Tampering, str]] = {
    "changed": (lambda lines: [*lines[:4], lines[4].replace(b"10.0.0.1", b"10.9.9.9"), *lines[5:]], "its HMAC is wrong"),
    "removed": (lambda lines: renumbered([*lines[:4], *lines[5:]]), "its HMAC is wrong"),
    "inserted": (lambda lines: renumbered([*lines[:4], lines[2], *lines[4:]]), "its HMAC is wrong"),
    "reordered": (lambda lines: renumbered([*lines[:4], lines[5], lines[4], *lines[6:]]), "its HMAC is wrong"),
    "tail removed": (lambda lines: lines[:-3], "is missing: a checkpoint names entry 10"),
    "computed again": (computed_again, "the chain has another key"),
}


def file_attacked(folder: Path, tamper: Tampering) -> str:
    file = folder / "audit.jsonl"
    lines = [line for _, line in file_lines(file)]
    assert verified(folder).broken is None and len(lines) == WHOLE
    file.write_bytes(b"".join(line + b"\n" for line in tamper(lines)))
    return str(verified(folder).broken)


def table_attacked(folder: Path, url: str, tamper: Tampering) -> str:
    with closing(AuditTable(database_url(url, folder))) as table:
        lines = [line for _, line in table.read()]
    assert verified(folder, url).broken is None and len(lines) == WHOLE
    engine = create_database_engine(database_url(url, folder))
    with engine.begin() as connection:
        for statement in (*_DROPS[engine.dialect.name], "DELETE FROM gateway_audit"):
            connection.exec_driver_sql(statement)
        for line in tamper(lines):
            read = read_line(line)
            assert read is not None
            row = {"chain": read.chain, "seq": read.seq, "time": read.time, "entry": line.decode()}
            connection.execute(insert(AUDIT).values(row))
    engine.dispose()
    return str(verified(folder, url).broken)


@pytest.mark.parametrize("attack", TAMPERING)
def test_a_file_that_was_tampered_with_is_detected(tmp_path: Path, attack: str) -> None:
    with log(tmp_path) as audit:
        for _ in range(CHANGES):
            audit.record(CHANGE)
    tamper, expected = TAMPERING[attack]
    assert expected in file_attacked(tmp_path, tamper)


@pytest.mark.parametrize("attack", TAMPERING)
def test_a_table_that_was_tampered_with_is_detected(tmp_path: Path, url: str, attack: str) -> None:
    with log(tmp_path, url) as audit:
        for _ in range(CHANGES):
            audit.record(CHANGE)
    tamper, expected = TAMPERING[attack]
    assert expected in table_attacked(tmp_path, url, tamper)
