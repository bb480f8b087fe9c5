"""Upgrade what commit 3c1fad8 left: its table, and its rows that wait on disk. No other module of this package knows these formats.

The rule: an upgrade may be interrupted and repeated. The counts of that commit in a Redis are upgraded by ``limits/redis/upgrade.lua``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, inspect, text

from gateway.api.settlement import Method
from gateway.ledger.row import UsageRow, encode, frame, frames
from gateway.ledger.spool import write_synced
from gateway.snapshot.money import rounded_nano_units

_FIELDS = UsageRow.__struct_fields__
_COUNT = 23  # fields of a row; the last one is ``metadata``. Later rows have more.


def upgrade_table(connection: Connection) -> None:
    """Give a table of revision 0001 the columns of 0003. Migration 0003 then creates what else is missing."""
    if not inspect(connection).has_table("gateway_usage_schema"):
        return
    if connection.execute(text("DELETE FROM gateway_usage_schema WHERE version_num = '0001'")).rowcount:
        connection.execute(text("ALTER TABLE gateway_usage ADD COLUMN estimated_by VARCHAR"))
        connection.execute(text("ALTER TABLE gateway_usage ADD COLUMN choices INTEGER"))


def folder_name(configuration: str) -> str:
    """Return the name of the folder in which the rows of a configuration wait, by the file's absolute path."""
    return hashlib.sha256(configuration.encode()).hexdigest()[:16]


def upgrade_files(paths: Iterable[Path]) -> None:
    """Write files of waiting rows again, in the current format. Raises OSError."""
    for path in paths:
        written = path.with_suffix(".upgraded")
        write_synced(written, b"".join(frame(upgraded(payload)) for payload in frames(path.read_bytes())))
        written.rename(path)


def upgraded(payload: bytes) -> bytes:
    """Return the payload of a row in the current format. Other bytes are returned as they are, to be counted when they are decoded."""
    try:
        fields = msgspec.msgpack.decode(payload, type=list)
        if len(fields) != _COUNT:
            return payload
        row: dict[str, Any] = dict(zip(_FIELDS, fields, strict=False))
        if row["price"] is not None:  # of prompt and completion tokens, in units of the currency
            prompt, completion = map(rounded_nano_units, row["price"])
            row["price"] = (prompt, completion, prompt, completion)
        events, row["chunks"] = row["chunks"], 0  # events of a truncated stream after its first one
        if row["first_token"] is not None and (row["completion"] or 0) < events:
            row |= {"completion": events, "estimated_by": Method.EVENTS}
        return encode(msgspec.convert([*row.values()], UsageRow))
    except msgspec.DecodeError:
        return payload
