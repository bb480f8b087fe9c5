"""Stores: a folder, and a bucket of a real server with S3's API. Both behave in the same way."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from gateway.config.values import installed
from gateway.recording.stores import Store, StoreError, open_store
from gateway.snapshot.snapshot import Recording
from tests.deploy.install import tool
from tests.support.ports import refusing, reserved
from tests.support.s3_server import BUCKET, CREDENTIALS, NOT_INSTALLED, s3_server

NEEDS_S3 = pytest.mark.skipif(tool("s3") is None or not installed("obstore"), reason=f"{NOT_INSTALLED}, and the extra record-s3")
ID = "req_68f0a1b2c3d4e5f60718293a"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with reserved() as port, s3_server(port) as url:
        yield url


@pytest.fixture(params=["folder", pytest.param("bucket", marks=NEEDS_S3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(Recording(str(tmp_path / "records")))
    return open_store(Recording(f"{request.getfixturevalue('bucket')}/{tmp_path.name}", credentials=CREDENTIALS))


def test_a_file_is_stored_and_read(store: Store) -> None:
    store.put(f"2026-05-01/{ID}.json", b"one")
    store.put(f"2026-05-01/{ID}.json", b"\x00two\xff")
    assert store.get(f"2026-05-01/{ID}.json") == b"\x00two\xff"
    assert store.get(f"2026-05-02/{ID}.json") is None


def test_a_day_is_deleted_whole_and_alone(store: Store) -> None:
    for day in ("2026-05-01", "2026-05-02"):
        for n in range(3):
            store.put(f"{day}/req_{n:024x}.json", b"x")
    assert sorted(store.days()) == [date(2026, 5, 1), date(2026, 5, 2)]
    store.delete(date(2026, 5, 1))
    store.delete(date(2026, 4, 1))
    assert list(store.days()) == [date(2026, 5, 2)]
    assert store.get(f"2026-05-01/req_{0:024x}.json") is None
    assert store.get(f"2026-05-02/req_{2:024x}.json") == b"x"


def test_an_empty_store_has_no_days(store: Store) -> None:
    assert list(store.days()) == []


def test_a_folder_is_private_and_has_only_whole_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_store(Recording(str(tmp_path / "a" / "records"))).put(f"2026-05-01/{ID}.json", b"x")
    finally:
        os.umask(before)
    found = {path.relative_to(tmp_path / "a").as_posix(): stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert found == {"records": 0o700, "records/2026-05-01": 0o700, f"records/2026-05-01/{ID}.json": 0o600}


def test_other_files_of_a_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "2026-05-01").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "2026-05-02").write_text("a file")
    assert list(open_store(Recording(str(tmp_path))).days()) == []


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file")
    with pytest.raises(StoreError, match=r"records: (File exists|Not a directory)"):
        open_store(Recording(str(tmp_path / "records"))).put(f"2026-05-01/{ID}.json", b"x")


@NEEDS_S3
def test_a_bucket_that_does_not_exist_is_reported_by_its_code(bucket: str) -> None:
    other = open_store(Recording(bucket.replace(f"/{BUCKET}", "/another"), credentials=CREDENTIALS))
    with pytest.raises(StoreError) as caught:
        other.put(f"2026-05-01/{ID}.json", b"x")
    assert str(caught.value) == "the bucket: NoSuchBucket"


@NEEDS_S3
def test_a_server_that_is_down_is_reported_without_a_secret() -> None:
    with refusing() as port, pytest.raises(StoreError) as caught:
        open_store(Recording(f"http://127.0.0.1:{port}/{BUCKET}", credentials=CREDENTIALS)).put(f"2026-05-01/{ID}.json", b"x")
    assert str(caught.value).startswith("the bucket: ")
    assert not any(secret in str(caught.value) for secret in CREDENTIALS)
