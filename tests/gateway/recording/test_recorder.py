"""The records of a worker: their memory is bounded, and each selected request is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.recording import capture, recorder
from gateway.recording.recorder import BodyRecorder
from gateway.snapshot.snapshot import Recording
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.recording.test_document import LENGTH, Sent
from tests.support.process import wait_for

MIB = 1024 * 1024


def used(one: BodyRecorder) -> int:
    """Return the bytes of all records that are not stored yet."""
    one.tick()
    return one._memory.used


@contextmanager
def recording(folder: Path, **settings: Any) -> Iterator[tuple[BodyRecorder, Counter[str]]]:
    results: Counter[str] = Counter()
    one = BodyRecorder(lambda result: results.update([result]), deletes=False)
    one.apply_settings(Recording(str(folder), share=1.0, **settings))
    try:
        yield one, results
    finally:
        one.close()


def record(number: int) -> RequestRecord:
    return RequestRecord(f"req_{number:024x}", 0.0, "completions", 200)


def test_a_record_that_is_too_large_is_dropped(tmp_path: Path) -> None:
    with recording(tmp_path) as (one, results):
        made = one.start("/v1/completions", 0.0, b"{}", Sent(), 0)
        assert made is not None
        for _ in range(capture.RECORD_LIMIT // MIB + 5):
            made.write(bytes(MIB))
        assert (made.pieces, one._memory.used, results) == ([], 0, {"too_large": 1})
        made.finish(record(1), None, is_event_stream=False)
    assert results == {"too_large": 1}
    assert list(tmp_path.iterdir()) == []


def test_all_records_together_are_bounded(tmp_path: Path) -> None:
    with recording(tmp_path) as (one, results):
        body = bytes(4 * MIB)
        made = [one.start("/v1/completions", 0.0, body, Sent(), 0) for _ in range(recorder.MEMORY_LIMIT // len(body) + 3)]
        assert [each is None for each in made] == [False] * 16 + [True] * 3
        assert (one._memory.used, results) == (recorder.MEMORY_LIMIT, {"no_memory": 3})
        assert made[0] is not None
        made[0].write(b"x")  # it has no memory either, and is dropped
        assert (one._memory.used, results) == (recorder.MEMORY_LIMIT - len(body), {"no_memory": 4})
        for number, each in enumerate(made[1:16]):
            assert each is not None
            each.received = b"{}"
            each.finish(record(number), None, is_event_stream=False)
        wait_for(lambda: used(one) == 0)
    assert results == {"no_memory": 4, "stored": 15}


@pytest.mark.parametrize("is_off", [False, True])
def test_other_settings_apply_to_requests_in_flight(tmp_path: Path, is_off: bool) -> None:
    settings = None if is_off else Recording(str(tmp_path / "elsewhere"), share=1.0)
    with recording(tmp_path / "records") as (one, results):
        before, after = (one.start("/v1/completions", 0.0, b"{}", Sent(), 0) for _ in range(2))
        assert before is not None and after is not None
        before.finish(record(1), None, is_event_stream=False)
        one.apply_settings(settings)
        after.finish(record(2), None, is_event_stream=False)
    assert used(one) == 0
    found = sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.json"))
    assert found == (["records"] if is_off else ["elsewhere", "records"])
    assert results["stopped"] == int(is_off)


def test_recording_that_is_off_has_no_thread() -> None:
    one = BodyRecorder(lambda _: None, deletes=True)
    one.apply_settings(None)
    one.tick()
    one.close()
    assert (one.selection, one._writer) == (None, None)


def test_the_bytes_of_a_response_are_not_copied(tmp_path: Path) -> None:
    with recording(tmp_path) as (one, _):
        made, data = one.start("/v1/completions", 0.0, b"{}", Sent(), 0), LENGTH + b"{}"
        assert made is not None
        made.write(data)
        assert made.pieces[0][1] is data
