"""The names of stored records: a folder for each day, and in it a file for each request.

The rule: a name is made from an ID that was checked, never from another value of a request. An ID begins with the second in which it was
generated (see ``gateway.telemetry.request_ids``), so it is found without an index.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

_ID = re.compile(r"req_[0-9a-f]{24}")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")

PLAIN, ENCRYPTED = ".json", ".json.enc"
"""The ends of the names of files."""


def file_name(identity: str, end: str) -> str:
    """Return the name of a record's file: ``DAY/ID`` and its end. Raises ValueError for a text that is not an ID."""
    if not _ID.fullmatch(identity):
        raise ValueError("expected the ID of a request: req_ and 24 hexadecimal digits, as in the header x-request-id")
    return f"{datetime.fromtimestamp(int(identity[4:12], 16), UTC):%Y-%m-%d}/{identity}{end}"


def day_of(folder: str) -> date | None:
    """Return the day of a folder; None for a folder that is not of this package."""
    if not _DAY.fullmatch(folder):
        return None
    try:
        return date.fromisoformat(folder)
    except ValueError:
        return None


def is_expired(day: date, now: datetime, retention: float) -> bool:
    """Return whether all records of a day are older than ``retention`` seconds."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1, seconds=retention) <= now
