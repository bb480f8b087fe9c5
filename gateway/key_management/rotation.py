"""Rotate a key: which of its former hashes stay valid, and until when. Pure.

The rule: a rotation never extends the life of a former key.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gateway.config import Key
from gateway.key_management.key_list import instant


def former_hashes(key: Key, end: datetime, now: datetime) -> list[dict[str, Any]]:
    """Return the hashes that stay valid after a rotation, as the configuration writes them. They expire at ``end`` or before."""
    former = [{"hash": one.text, "expires": instant(min(one.expires or end, end))} for one in key.hashes]
    return [one for one in former if datetime.fromisoformat(one["expires"]) > now]
