"""Rows on disk: in order, bounded, whole again after every death."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.ledger.errors import SpoolLockedError
from gateway.ledger.row import frame
from gateway.ledger.spool import Spool, save, spool


def append(kept: Spool, *payloads: bytes) -> None:
    kept.append(b"".join(map(frame, payloads)), len(payloads))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What is written beyond it fails, behind as much as fits, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def drained(kept: Spool) -> list[bytes]:
    found: list[bytes] = []
    while (segment := kept.oldest()) is not None:
        payloads = segment.payloads()
        found += payloads
        kept.remove(segment, len(payloads))
    assert (kept.rows, kept.size) == (0, 0)
    return found


def test_rows_are_taken_in_order_and_gone_when_done(tmp_path: Path) -> None:
    kept = Spool(tmp_path)
    append(kept, b"one", b"two")
    append(kept, b"three")
    assert kept.rows == 3 and kept.size == sum(file.stat().st_size for file in tmp_path.glob("*.rows"))
    segment = kept.oldest()
    assert segment is not None and kept.oldest() is segment, "until it is done"
    append(kept, b"four")
    kept.remove(segment, 2 + 1)
    assert drained(kept) == [b"four"] and not list(tmp_path.glob("*.rows"))


def test_a_restart_finds_everything_in_order(tmp_path: Path) -> None:
    first = Spool(tmp_path, segment=40)
    for number in range(20):
        append(first, b"row %d" % number)
    save(tmp_path, frame(b"saved"), [b"held"])
    again = Spool(tmp_path)
    append(again, b"new")
    assert again.rows == 23 and drained(again) == [*(b"row %d" % number for number in range(20)), b"saved", b"held", b"new"]


def test_what_a_worker_saves_later_is_found_too(tmp_path: Path) -> None:
    kept = Spool(tmp_path)
    save(tmp_path, b"", [b"held"])
    save(tmp_path, b"", [])
    assert drained(kept) == [b"held"]


@pytest.mark.parametrize("cut", range(1, len(frame(b"second"))))
def test_a_torn_end_costs_the_torn_row_alone(tmp_path: Path, cut: int) -> None:
    append(Spool(tmp_path), b"first", b"second")
    (file,) = tmp_path.glob("*.rows")
    file.write_bytes(file.read_bytes()[:-cut])
    again = Spool(tmp_path)
    assert again.rows == 1 and drained(again) == [b"first"]


def test_beyond_its_bound_the_oldest_go_and_are_counted(tmp_path: Path) -> None:
    kept = Spool(tmp_path, limit=200, segment=40)
    for number in range(20):
        append(kept, b"row %02d" % number)
    assert kept.size <= 200 and kept.dropped == 20 - kept.rows > 0
    left = drained(kept)
    assert left == [b"row %02d" % number for number in range(20 - len(left), 20)]


def test_what_is_being_written_to_the_database_is_not_dropped(tmp_path: Path) -> None:
    kept = Spool(tmp_path, limit=60, segment=10)
    append(kept, b"in the making")
    segment = kept.oldest()
    for _ in range(10):
        append(kept, b"a lot of rows")
    assert segment is not None and segment.payloads() == [b"in the making"] and kept.dropped > 0


def test_a_disk_that_fails_takes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    kept = Spool(folder)
    folder.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        append(kept, b"one")
    assert kept.rows == 0
    (tmp_path / "away").rename(folder)
    append(kept, b"two")
    assert drained(kept) == [b"two"]


@pytest.mark.parametrize("before", [(), (b"there",)], ids=["new", "grown"])
def test_a_disk_that_is_full_is_left_no_files_that_nobody_knows_of(tmp_path: Path, before: tuple[bytes, ...]) -> None:
    kept = Spool(tmp_path)
    if before:
        append(kept, *before)
    with files_of_at_most(4096):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                append(kept, b"many rows" * 1000)
    assert len(list(tmp_path.glob("*.rows"))) == kept.rows == len(before)
    append(kept, b"one")
    assert drained(kept) == [*before, b"one"] and not list(tmp_path.iterdir())


def test_one_gateway_at_a_time(tmp_path: Path) -> None:
    with spool(tmp_path / "spool") as kept:
        append(kept, b"one")
        with pytest.raises(SpoolLockedError), spool(tmp_path / "spool"):
            pass
    with spool(tmp_path / "spool") as kept:
        assert drained(kept) == [b"one"]
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700


def spoil(file: Path) -> None:
    """Have nobody read it any more, whoever he is."""
    file.unlink()
    file.mkdir()


def test_a_file_that_cannot_be_read_is_laid_aside_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Spool(tmp_path, segment=10)
    append(kept, b"one", b"two")
    append(kept, b"three")
    segment = kept.oldest()
    assert segment is not None
    spoil(segment.path)
    assert kept.payloads(segment) is None
    assert (kept.rows, kept.dropped) == (1, 2)
    assert segment.path.with_suffix(".unreadable").is_dir() and "quarantined, with 2 rows" in caplog.text
    assert drained(kept) == [b"three"]


def test_nor_does_it_keep_the_next_gateway_from_starting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(Spool(tmp_path, segment=10), b"one", b"two")
    (file,) = tmp_path.glob("*.rows")
    spoil(file)
    append(Spool(tmp_path), b"three")
    assert drained(Spool(tmp_path)) == [b"three"]
    assert caplog.text.count("quarantined") == 1


def test_while_the_whole_folder_is_away_nothing_is_given_up(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    kept = Spool(folder)
    append(kept, b"one")
    segment = kept.oldest()
    assert segment is not None
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        kept.payloads(segment)
    folder.mkdir()  # where it was mounted
    with pytest.raises(OSError, match="No such file"):
        kept.payloads(segment)
    folder.rmdir()
    (tmp_path / "elsewhere").rename(folder)
    assert kept.payloads(segment) == [b"one"]
    assert (kept.rows, kept.dropped) == (1, 0)


def test_rows_that_are_not_given_back_are_counted(tmp_path: Path) -> None:
    kept = Spool(tmp_path)
    append(kept, b"one", b"two")
    (file,) = tmp_path.glob("*.rows")
    file.write_bytes(file.read_bytes()[:-1])
    assert drained(kept) == [b"one"]
    assert kept.dropped == 1


def test_a_file_that_is_removed_while_it_grows_costs_its_own_rows_alone(tmp_path: Path) -> None:
    kept = Spool(tmp_path)
    append(kept, b"one")
    (file,) = tmp_path.glob("*.rows")
    file.unlink()
    with pytest.raises(OSError, match="No such file"):
        append(kept, b"two")
    append(kept, b"two")
    segment = kept.oldest()
    assert segment is not None and kept.payloads(segment) is None
    assert drained(kept) == [b"two"]
    assert kept.dropped == 1
