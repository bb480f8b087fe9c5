"""Names of files: from IDs only, and found by an ID without an index."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.recording.names import PLAIN, day_of, file_name, is_expired
from gateway.telemetry.request_ids import request_ids


def test_the_name_has_the_day_of_the_id() -> None:
    assert file_name("req_00000000" + "a" * 16, PLAIN) == "1970-01-01/req_00000000aaaaaaaaaaaaaaaa.json"
    for identity in itertools.islice(request_ids(), 5):
        day = day_of(file_name(identity, PLAIN).partition("/")[0])
        assert day is not None
        assert abs(day - datetime.now(UTC).date()) <= timedelta(days=1)


NOT_IDS = (
    *("", "req_", "../../etc/passwd", "/" + "0" * 27),
    *("req_" + "0" * 23, "req_" + "0" * 25, "req_" + "G" * 24, "req_" + "0" * 24 + "\n", "req_" + "٣" * 24),
)


@pytest.mark.parametrize("identity", NOT_IDS)
def test_another_text_is_not_an_id(identity: str) -> None:
    with pytest.raises(ValueError, match="expected the ID"):
        file_name(identity, PLAIN)


@given(st.text(max_size=40))
def test_no_text_becomes_a_path(text: str) -> None:
    try:
        name = file_name(text, PLAIN)
    except ValueError:
        return
    assert name.count("/") == 1
    assert ".." not in name


@pytest.mark.parametrize("folder", ["", ".", "..", "2026-13-01", "2026-1-1", "2026-01-01.bak", "lost+found"])
def test_another_folder_is_not_a_day(folder: str) -> None:
    assert day_of(folder) is None


def test_a_day_expires_after_its_last_record() -> None:
    day, retention = date(2026, 5, 1), 7 * 86400.0
    last = datetime(2026, 5, 1, 23, 59, 59, tzinfo=UTC)
    assert not is_expired(day, last + timedelta(days=7), retention)
    assert is_expired(day, last + timedelta(days=7, seconds=1), retention)
