"""Rows on disk: in order, bounded, and complete again after a crash."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.ledger.errors import SpoolLockedError
from gateway.ledger.row import frame
from gateway.ledger.spool import Spool, save, spool


def append(spooled: Spool, *payloads: bytes) -> None:
    spooled.append(b"".join(map(frame, payloads)), len(payloads))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes beyond a size fail after the part that fits, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def drained(spooled: Spool) -> list[bytes]:
    found: list[bytes] = []
    while (segment := spooled.oldest()) is not None:
        payloads = spooled.payloads(segment)
        assert payloads is not None
        found += payloads
        spooled.remove(segment, len(payloads))
    assert (spooled.rows, spooled.size) == (0, 0)
    return found


def test_rows_are_read_in_order_and_removed_when_delivered(tmp_path: Path) -> None:
    spooled = Spool(tmp_path)
    append(spooled, b"one", b"two")
    append(spooled, b"three")
    assert spooled.rows == 3 and spooled.size == sum(file.stat().st_size for file in tmp_path.glob("*.rows"))
    segment = spooled.oldest()
    assert segment is not None and spooled.oldest() is segment, "until it is removed"
    append(spooled, b"four")
    spooled.remove(segment, 2 + 1)
    assert drained(spooled) == [b"four"] and not list(tmp_path.glob("*.rows"))


def test_a_restart_finds_everything_in_order(tmp_path: Path) -> None:
    first = Spool(tmp_path, segment=40)
    for number in range(20):
        append(first, b"row %d" % number)
    save(tmp_path, frame(b"saved"), [b"held"])
    again = Spool(tmp_path)
    append(again, b"new")
    assert again.rows == 23 and drained(again) == [*(b"row %d" % number for number in range(20)), b"saved", b"held", b"new"]


def test_rows_that_a_worker_saves_later_are_found(tmp_path: Path) -> None:
    spooled = Spool(tmp_path)
    save(tmp_path, b"", [b"held"])
    save(tmp_path, b"", [])
    assert drained(spooled) == [b"held"]


@pytest.mark.parametrize("cut", range(1, len(frame(b"second"))))
def test_an_incomplete_last_row_is_the_only_one_lost(tmp_path: Path, cut: int) -> None:
    append(Spool(tmp_path), b"first", b"second")
    (file,) = tmp_path.glob("*.rows")
    file.write_bytes(file.read_bytes()[:-cut])
    again = Spool(tmp_path)
    assert again.rows == 1 and drained(again) == [b"first"]


def test_beyond_the_limit_the_oldest_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    spooled = Spool(tmp_path, limit=200, segment=40)
    for number in range(20):
        append(spooled, b"row %02d" % number)
    assert spooled.size <= 200 and spooled.dropped == 20 - spooled.rows > 0
    left = drained(spooled)
    assert left == [b"row %02d" % number for number in range(20 - len(left), 20)]


def test_rows_that_are_being_delivered_are_not_dropped(tmp_path: Path) -> None:
    spooled = Spool(tmp_path, limit=60, segment=10)
    append(spooled, b"in the making")
    segment = spooled.oldest()
    for _ in range(10):
        append(spooled, b"a lot of rows")
    assert segment is not None and spooled.payloads(segment) == [b"in the making"] and spooled.dropped > 0


def test_a_failed_write_stores_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    spooled = Spool(folder)
    folder.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        append(spooled, b"one")
    assert spooled.rows == 0
    (tmp_path / "away").rename(folder)
    append(spooled, b"two")
    assert drained(spooled) == [b"two"]


@pytest.mark.parametrize("before", [(), (b"there",)], ids=["new", "grown"])
def test_a_full_disk_has_no_file_without_its_rows_counted(tmp_path: Path, before: tuple[bytes, ...]) -> None:
    spooled = Spool(tmp_path)
    if before:
        append(spooled, *before)
    with files_of_at_most(4096):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                append(spooled, b"many rows" * 1000)
    assert len(list(tmp_path.glob("*.rows"))) == spooled.rows == len(before)
    append(spooled, b"one")
    assert drained(spooled) == [*before, b"one"] and not list(tmp_path.iterdir())


def test_one_gateway_at_a_time(tmp_path: Path) -> None:
    with spool(tmp_path / "spool") as spooled:
        append(spooled, b"one")
        with pytest.raises(SpoolLockedError), spool(tmp_path / "spool"):
            pass
    with spool(tmp_path / "spool") as spooled:
        assert drained(spooled) == [b"one"]
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700


def make_unreadable(file: Path) -> None:
    """Replace a file by a folder, which root cannot read as a file either."""
    file.unlink()
    file.mkdir()


def test_an_unreadable_file_is_renamed_and_its_rows_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spooled = Spool(tmp_path, segment=10)
    append(spooled, b"one", b"two")
    append(spooled, b"three")
    segment = spooled.oldest()
    assert segment is not None
    make_unreadable(segment.path)
    assert spooled.payloads(segment) is None
    assert (spooled.rows, spooled.dropped) == (1, 2)
    assert segment.path.with_suffix(".unreadable").is_dir() and "quarantined, with 2 rows" in caplog.text
    assert drained(spooled) == [b"three"]


def test_the_next_gateway_starts_with_an_unreadable_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(Spool(tmp_path, segment=10), b"one", b"two")
    (file,) = tmp_path.glob("*.rows")
    make_unreadable(file)
    append(Spool(tmp_path), b"three")
    assert drained(Spool(tmp_path)) == [b"three"]
    assert caplog.text.count("quarantined") == 1


def test_rows_are_not_dropped_while_the_folder_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    spooled = Spool(folder)
    append(spooled, b"one")
    segment = spooled.oldest()
    assert segment is not None
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        spooled.payloads(segment)
    folder.mkdir()  # where it was mounted
    with pytest.raises(OSError, match="No such file"):
        spooled.payloads(segment)
    folder.rmdir()
    (tmp_path / "elsewhere").rename(folder)
    assert spooled.payloads(segment) == [b"one"]
    assert (spooled.rows, spooled.dropped) == (1, 0)


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    spooled = Spool(tmp_path)
    append(spooled, b"one", b"two")
    (file,) = tmp_path.glob("*.rows")
    file.write_bytes(file.read_bytes()[:-1])
    assert drained(spooled) == [b"one"]
    assert spooled.dropped == 1


def test_a_removed_file_loses_only_its_own_rows(tmp_path: Path) -> None:
    spooled = Spool(tmp_path)
    append(spooled, b"one")
    (file,) = tmp_path.glob("*.rows")
    file.unlink()
    with pytest.raises(OSError, match="No such file"):
        append(spooled, b"two")
    append(spooled, b"two")
    segment = spooled.oldest()
    assert segment is not None and spooled.payloads(segment) is None
    assert drained(spooled) == [b"two"]
    assert spooled.dropped == 1
