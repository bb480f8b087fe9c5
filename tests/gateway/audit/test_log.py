"""The running audit log: entries are durable at once, reach the table, and wait on disk while the database is away."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gateway.access.actor import Actor, Role
from gateway.audit.chain import read_line, signed_checkpoints
from gateway.audit.entry import AuditUnavailableError, Entry
from gateway.audit.journal import checkpoint_file
from gateway.audit.lines import file_lines, merged
from gateway.audit.log import AuditLog, Where, running
from gateway.audit.table import AuditTable
from gateway.audit.verification import Verified, verify
from gateway.ledger.store import database_url
from gateway.telemetry.metrics import Series
from tests.support.process import wait_for

KEY = b"k" * 32
STARTED = Entry("gateway.start", Actor("gateway", "", None), "host", "", None, None)
CHANGE = Entry("key.create", Actor("token", "ci", Role.ADMIN), "10.0.0.1", "k", None, {"limit": 1})


def location(folder: Path, url: str | None = None) -> Where:
    state = folder / "state"
    if url is None:
        return Where(folder / "audit.jsonl", state)
    return Where(state / "spool.jsonl", state, AuditTable(database_url(url, folder)))


@contextmanager
def log(folder: Path, url: str | None = None, output: int | None = None) -> Iterator[AuditLog]:
    with running(location(folder, url), KEY, output, STARTED) as made:
        yield made


def verified(folder: Path, url: str | None = None) -> Verified:
    checkpoints = signed_checkpoints(checkpoint_file(folder / "state").read_text(), KEY)
    if url is None:
        return verify(file_lines(folder / "audit.jsonl"), [KEY], checkpoints)
    waiting = list(file_lines(folder / "state" / "spool.jsonl"))
    with closing(AuditTable(database_url(url, folder))) as table:
        return verify(merged(table.read(), waiting), [KEY], checkpoints)


def value(audit: AuditLog, name: str, *labels: str) -> float:
    return audit.series()[Series(name, labels)][0]


def state(audit: AuditLog) -> str:
    [observed] = audit.dependencies()
    return observed.state


def test_an_entry_is_in_the_file_when_record_returns(tmp_path: Path) -> None:
    with log(tmp_path) as audit:
        audit.record(CHANGE)
        assert (verified(tmp_path).broken, verified(tmp_path).entries) == (None, 2)
        assert (value(audit, "audit_entries_total", "recorded"), state(audit)) == (2, "up")
    assert [line.action for _, data in file_lines(tmp_path / "audit.jsonl") if (line := read_line(data))] == [
        "gateway.start",
        "key.create",
        "gateway.stop",
    ]


def test_entries_of_several_threads_are_one_chain(tmp_path: Path, url: str) -> None:
    with log(tmp_path, url) as audit:

        def record() -> None:
            for _ in range(20):
                audit.record(CHANGE)

        threads = [threading.Thread(target=record) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert (verified(tmp_path, url).broken, verified(tmp_path, url).entries) == (None, 161)
    assert (verified(tmp_path, url).broken, verified(tmp_path, url).entries) == (None, 162)
    with closing(AuditTable(database_url(url, tmp_path))) as table:
        assert len(list(table.read())) == 162, "the rest was delivered at the end"


def test_entries_wait_on_disk_while_the_database_is_away(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    url = f"sqlite:///{folder}/audit.db"
    with log(tmp_path, url) as audit:
        for _ in range(5):
            audit.record(CHANGE)
        wait_for(lambda: state(audit) == "down")
        assert value(audit, "audit_spool_entries") == 6 and value(audit, "audit_spool_bytes") > 0
        assert (verified(tmp_path, url).broken, verified(tmp_path, url).entries) == (None, 6)
    with log(tmp_path, url) as audit:
        assert value(audit, "audit_spool_entries") >= 7, "also those of the gateway before"
        folder.mkdir()
        wait_for(lambda: value(audit, "audit_spool_entries") == 0)
        wait_for(lambda: state(audit) == "up" and value(audit, "audit_spool_bytes") == 0)
        assert verified(tmp_path, url).broken is None


def test_a_removed_tail_of_the_table_is_found_by_the_stored_checkpoint(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/audit.db"
    with log(tmp_path, url) as audit:
        audit.record(CHANGE)
    with closing(sqlite3.connect(tmp_path / "audit.db")) as connection:
        connection.executescript("DROP TRIGGER gateway_audit_no_delete; DELETE FROM gateway_audit WHERE seq = 3;")
    assert "entry 3: is missing" in str(verified(tmp_path, url).broken)


def test_no_change_is_possible_while_nothing_can_be_written(tmp_path: Path) -> None:
    with log(tmp_path) as audit:
        (tmp_path / "state" / "checkpoint").unlink()
        (tmp_path / "state" / "checkpoint").mkdir()
        with pytest.raises(AuditUnavailableError):
            audit.record(CHANGE)
        with pytest.raises(AuditUnavailableError):
            audit.check()
        audit.record_refused(CHANGE)
        assert state(audit) == "down" and value(audit, "audit_entries_total", "failed") == 3
        (tmp_path / "state" / "checkpoint").rmdir()
        audit.check()
        audit.record(CHANGE)
        assert state(audit) == "up"
    assert verified(tmp_path).broken is None


def test_refused_attempts_are_limited_and_counted(tmp_path: Path) -> None:
    with log(tmp_path) as audit:
        for _ in range(400):
            audit.record_refused(CHANGE)
        suppressed = value(audit, "audit_entries_total", "suppressed")
        assert suppressed >= 250
        audit.record(CHANGE)
        assert value(audit, "audit_entries_total", "recorded") + suppressed >= 401
    assert verified(tmp_path).broken is None


def test_a_value_that_json_does_not_have_is_no_entry(tmp_path: Path) -> None:
    with log(tmp_path) as audit:
        audit.record_refused(Entry("x.refused", CHANGE.actor, "", "\ud800", None, {"value": object()}))
        assert value(audit, "audit_entries_total", "suppressed") == 1
    assert verified(tmp_path).broken is None


def test_lines_go_to_standard_output_too(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb") as output, log(tmp_path, output=output.fileno()) as audit:
        audit.record(CHANGE)
        lines = [pipe.readline()[:-1] for _ in range(2)]
        assert lines == [data for _, data in file_lines(tmp_path / "audit.jsonl")]


def test_a_blocked_standard_output_delays_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as output:
        with log(tmp_path, output=output.fileno()) as audit:
            entry = Entry("key.create", CHANGE.actor, "", "", None, {"text": "x" * 60_000})
            for _ in range(3):
                audit.record(entry)
            assert value(audit, "audit_lines_dropped_total") == 0, "they wait in memory"
        assert verified(tmp_path).entries == 5


def test_the_signed_checkpoint_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllm_gateway.audit"), log(tmp_path) as audit:
        audit.record(CHANGE)
    checkpoints = signed_checkpoints(caplog.text, KEY)
    assert [checkpoint.seq for checkpoint in checkpoints] == [1, 3]
    assert verify(file_lines(tmp_path / "audit.jsonl"), [KEY], checkpoints).broken is None
    lines = list(file_lines(tmp_path / "audit.jsonl"))
    assert "entry 2: is missing" in str(verify(lines[:1], [KEY], checkpoints).broken)
