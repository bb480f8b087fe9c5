"""Rows as tests need them."""

from __future__ import annotations

from typing import Any

from gateway.ledger.row import UsageRow, encode

STARTED = 1_800_000_000.5
"""2027-01-15T08:00:00.5Z"""


def row(number: int = 1, **fields: Any) -> UsageRow:
    known: dict[str, Any] = {
        "id": f"req_{number}", "started": STARTED, "endpoint": "/v1/chat/completions", "key": "team-a", "model": "tiny",
        "server": "tiny#0", "status": 200, "prompt": 10, "completion": 5, "cached": 2, "reasoning": 1, "duration": 0.25,
    }  # fmt: skip
    return UsageRow(**{**known, **fields})


def payload(number: int = 1, **fields: Any) -> bytes:
    return encode(row(number, **fields))
