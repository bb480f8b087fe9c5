"""The thread that stores records: what it deletes, and what happens while its store fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.recording import writer
from gateway.recording.capture import Capture, Memory
from gateway.recording.encryption import Encryption
from gateway.recording.writer import Writer
from gateway.snapshot.snapshot import Recording
from gateway.telemetry.request_ids import request_ids
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.recording.test_document import LENGTH, Sent
from tests.support.process import wait_for

KEY = bytes(32)


class Running:
    """A writer and what it has reported."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.results: list[str] = []
        self.ids = request_ids()
        self.writer = Writer(Recording(str(folder), share=1.0, **settings), deletes=True)

    def add(self, body: bytes = b'{"prompt":"b"}', response: bytes = b"{}") -> str:
        """Add a capture and wait for its result. Returns its ID."""
        made = Capture("/v1/completions", 0.0, body, Sent(), Memory(10**6), lambda _: None, self.writer.add)
        made.pieces = [(1.0, LENGTH + response)]
        before, identity = len(self.results), next(self.ids)
        made.finish(RequestRecord(identity, 0.0, "completions", 200), "served", is_event_stream=False)
        wait_for(lambda: self.collected() > before)
        return identity

    def collected(self) -> int:
        self.writer.collect(lambda _, result: self.results.append(result))
        return len(self.results)


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Running]:
    made = Running(folder, **settings)
    try:
        yield made
    finally:
        made.writer.close()
        made.writer.join()
        made.collected()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_record_is_stored(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        identity = one.add()
        assert one.results == ["stored"]
    (file,) = files(tmp_path)
    assert orjson.loads(file.read_bytes())["id"] == identity


def test_a_record_is_encrypted(tmp_path: Path) -> None:
    with running(tmp_path, encryption_keys=(KEY,)) as one:
        identity = one.add(b'{"prompt":"a-hidden-text"}')
    (file,) = files(tmp_path)
    assert file.name == f"{identity}.json.enc"
    assert b"a-hidden-text" not in file.read_bytes()
    assert b"a-hidden-text" in Encryption([KEY]).decrypt(identity, file.read_bytes())


def test_a_failing_store_drops_records_and_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_gateway.worker")
    folder = tmp_path / "records"
    folder.write_text("a file in place of the folder")
    with running(folder) as one:
        for _ in range(5):
            one.add()
        assert set(one.results) == {"store_failed"}
        folder.unlink()
        wait_for(lambda: one.add() and one.results[-1] == "stored", seconds=90)
    assert [record.levelname for record in caplog.records if "recorded" in record.message] == ["WARNING", "INFO"]


def test_what_cannot_be_redacted_is_counted(tmp_path: Path) -> None:
    with running(tmp_path, redact=("content",)) as one:
        one.add(response=b"not JSON")
        one.add(response=b'{"content":"x"}')
        assert one.results == ["not_parsed", "stored"]
    assert len(files(tmp_path)) == 1


def test_a_capture_is_empty_after_it_was_written(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        made = Capture("/v1/completions", 0.0, b"{}", Sent(), Memory(10**6), lambda _: None, one.writer.add)
        made.pieces = [(1.0, LENGTH + b"{}")]
        made.finish(RequestRecord(next(one.ids), 0.0, "completions", 200), None, is_event_stream=False)
        wait_for(one.collected)
        assert (made.received, made.sent, made.pieces) == (b"", None, [])


def test_expired_days_are_deleted_and_others_are_not(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    for days in (0, 1, 2, 5, 400):
        folder = tmp_path / f"{now - timedelta(days=days):%Y-%m-%d}"
        folder.mkdir()
        (folder / f"req_{days:024x}.json").write_text("{}")
    with running(tmp_path, retention=3 * 86400.0):
        wait_for(lambda: len(files(tmp_path)) == 3)
    assert {int(path.stem[4:], 16) for path in files(tmp_path)} == {0, 1, 2}
    assert writer.DELETE_EVERY < 86400


def test_closing_stores_what_was_added(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        for n in range(20):
            made = Capture("/v1/completions", 0.0, b"{}", Sent(), Memory(10**6), lambda _: None, one.writer.add)
            made.finish(RequestRecord(f"req_{n:024x}", 0.0, "completions", 200), None, is_event_stream=False)
    assert (len(files(tmp_path)), one.results) == (20, ["stored"] * 20)
