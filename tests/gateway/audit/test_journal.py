"""The journal: its chain continues after restarts and crashes, and a removed end shows."""

from __future__ import annotations

import os
import resource
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.access.actor import Actor
from gateway.audit.chain import Checkpoint, signed_checkpoints
from gateway.audit.entry import AuditUnavailableError, Entry
from gateway.audit.journal import JournalLockedError, checkpoint_file, journal
from gateway.audit.lines import file_lines
from gateway.audit.verification import Verified, verify

KEY = b"k" * 32
WHEN = datetime(2027, 1, 31, tzinfo=UTC)


def append(folder: Path, *names: str, key: bytes = KEY, limit: int | None = None) -> Checkpoint:
    with journal(folder / "log", folder / "state", key, limit) as opened:
        for name in names:
            opened.append(Entry(name, Actor("gateway", "", None), "", "", None, {"text": "x" * 3000}), WHEN)
        return opened.checkpoint


def stored(folder: Path) -> list[Checkpoint]:
    return signed_checkpoints(checkpoint_file(folder / "state").read_text(), KEY)


def verified(folder: Path, *files: str) -> Verified:
    lines = [line for name in files or ("log",) for line in file_lines(folder / name)]
    return verify(lines, [KEY], stored(folder))


def test_the_chain_continues_after_a_restart(tmp_path: Path) -> None:
    first, second = append(tmp_path, "a", "b"), append(tmp_path, "c")
    assert (first.chain, first.seq, second.seq) == (second.chain, 2, 3)
    assert (verified(tmp_path).broken, verified(tmp_path).entries, stored(tmp_path)) == (None, 3, [second])
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("log", "state/checkpoint")] == ["0o600", "0o600"]


def test_another_process_cannot_write_the_same_chain(tmp_path: Path) -> None:
    with journal(tmp_path / "log", tmp_path / "state", KEY), pytest.raises(JournalLockedError):
        append(tmp_path, "a")


def test_an_incomplete_line_at_the_end_is_removed(tmp_path: Path) -> None:
    append(tmp_path, "a", "b")
    whole = (tmp_path / "log").read_bytes()
    for torn in (b"{", whole[:3000], whole[: whole.index(b"\n")]):
        (tmp_path / "log").write_bytes(whole + torn)
        assert verified(tmp_path).broken is None, "a reader passes over it"
        append(tmp_path)
        assert (tmp_path / "log").read_bytes() == whole
    append(tmp_path, "c")
    assert (verified(tmp_path).broken, verified(tmp_path).entries) == (None, 3)


def test_a_line_whose_checkpoint_was_not_written_is_part_of_the_chain(tmp_path: Path) -> None:
    append(tmp_path, "a")
    shutil.copy(checkpoint_file(tmp_path / "state"), tmp_path / "earlier")
    append(tmp_path, "b")
    shutil.copy(tmp_path / "earlier", checkpoint_file(tmp_path / "state"))
    assert append(tmp_path, "c").seq == 3
    assert (verified(tmp_path).broken, verified(tmp_path).entries) == (None, 3)


def test_a_removed_end_shows_for_ever(tmp_path: Path) -> None:
    append(tmp_path, "a", "b", "c")
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    for remaining in (lines[:1], []):
        (tmp_path / "log").write_bytes(b"".join(remaining))
        assert "is missing" in str(verified(tmp_path).broken)
    append(tmp_path, "d")
    assert "has the number 4, but entries 1 to 3 are missing" in str(verified(tmp_path).broken)


def test_a_removed_end_shows_while_the_gateway_runs(tmp_path: Path) -> None:
    with journal(tmp_path / "log", tmp_path / "state", KEY) as opened:
        entry = Entry("a", Actor("gateway", "", None), "", "", None, None)
        for _ in range(3):
            opened.append(entry, WHEN)
        os.truncate(tmp_path / "log", (tmp_path / "log").read_bytes().index(b"\n") + 1)
        opened.append(entry, WHEN)
    assert "has the number 4, but entries 2 to 3 are missing" in str(verified(tmp_path).broken)


def test_a_moved_file_is_continued_by_a_new_one(tmp_path: Path) -> None:
    with journal(tmp_path / "log", tmp_path / "state", KEY) as opened:
        entry = Entry("a", Actor("gateway", "", None), "", "", None, None)
        opened.append(entry, WHEN)
        (tmp_path / "log").rename(tmp_path / "log.1")
        opened.append(entry, WHEN)
    assert verified(tmp_path, "log.1", "log").broken is None
    assert "entry 1 is missing" in str(verified(tmp_path).broken)


def test_a_lost_checkpoint_is_found_again_at_the_end_of_the_file(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        append(tmp_path, "a")
        checkpoint_file(tmp_path / "state").unlink()
        assert append(tmp_path).seq == count
    append(tmp_path, "b")
    assert (verified(tmp_path).broken, verified(tmp_path).entries) == (None, 4)


def test_another_secret_begins_a_new_chain(tmp_path: Path) -> None:
    first = append(tmp_path, "a")
    second = append(tmp_path, "b", key=b"o" * 32)
    assert (second.seq, first.chain == second.chain) == (1, False)
    assert verify(file_lines(tmp_path / "log"), [KEY, b"o" * 32], [first, second]).broken is None


def test_a_full_spool_takes_no_more(tmp_path: Path) -> None:
    with pytest.raises(AuditUnavailableError, match="wait for the database"):
        append(tmp_path, *"abcd", limit=9000)
    assert verified(tmp_path).entries == 3


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the kernel writes a part of the line, then refuses the rest."""
    append(tmp_path, "a", "b")
    whole, former = (tmp_path / "log").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with journal(tmp_path / "log", tmp_path / "state", KEY) as opened:
        entry = Entry("c", Actor("gateway", "", None), "", "", None, {"text": "x" * 3000})
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 1000, former[1]))
        try:
            with pytest.raises(AuditUnavailableError, match="File too large"):
                opened.append(entry, WHEN)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        assert (tmp_path / "log").read_bytes() == whole
        opened.append(entry, WHEN)
    assert (verified(tmp_path).broken, verified(tmp_path).entries) == (None, 3)
