"""The received requests, one entry each, for tests that check what a gateway sent.

Owns the entries. Their number is limited: the oldest are removed. For a long body that is not JSON, only the start is shown.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

MOST_ENTRIES: Final = 10_000
MOST_BODY: Final = 1 << 20


@dataclass(slots=True)
class JournalEntry:
    """A received request and its outcome. Times are seconds since the epoch.

    ``outcome`` is ``open`` until it is one of: ``finished`` (the complete response was sent), ``refused`` (an error
    status), ``disconnected`` (the client disconnected), ``cut`` (the simulator closed the connection).
    """

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    began: float = field(default_factory=time.time)
    body: bytes = b""
    outcome: str = "open"
    ended: float | None = None
    status: int | None = None
    events_sent: int = 0
    bytes_sent: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def end(self, outcome: str) -> None:
        """Set the outcome, unless it is already set."""
        if self.outcome == "open":
            self.outcome, self.ended = outcome, time.time()

    def shown(self) -> dict[str, Any]:
        """Return the entry for ``GET /sim/requests``: ``headers`` as pairs in their order, ``body`` parsed if it is JSON."""
        return {
            "method": self.method,
            "path": self.path,
            "query": self.query,
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers],
            "body": _readable(self.body),
            "body_bytes": len(self.body),
            "began": self.began,
            "ended": self.ended,
            "outcome": self.outcome,
            "status": self.status,
            "events_sent": self.events_sent,
            "bytes_sent": self.bytes_sent,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


def _readable(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MOST_BODY].decode("utf-8", "replace") or None


class Journal:
    """The latest entries, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[JournalEntry] = deque(maxlen=MOST_ENTRIES)

    def open(self, entry: JournalEntry) -> JournalEntry:
        self._entries.append(entry)
        return entry

    def clear(self) -> None:
        self._entries.clear()

    def shown(self) -> list[dict[str, Any]]:
        return [entry.shown() for entry in self._entries]
