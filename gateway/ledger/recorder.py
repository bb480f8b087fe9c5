"""A worker's side of the ledger: what a request's row says, kept from its start to its end.

The rule: a request never waits for the ledger. A row is a few hundred bytes that are put into shared memory; when control does
not take them, they are dropped and counted there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from gateway.api.routes import ENDPOINTS
from gateway.api.usage import Usage
from gateway.ledger.journal import Journal
from gateway.ledger.last_resort import write_out
from gateway.ledger.row import LOST, UsageRow, encode, frames
from gateway.ledger.spool import save
from gateway.snapshot.snapshot import Key, Model, Snapshot
from gateway.telemetry.request_record import USER_LIMIT, RequestRecord

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # in JSON; behind another backslash it is six characters of a text
_METADATA_LIMIT = 16 * 1024  # bytes of `metadata`; OpenAI's own bounds are below
_NOTHING = Usage()
_ENDPOINTS = frozenset(ENDPOINTS)


class _OpenRequest(msgspec.Struct, frozen=True, gc=False):
    """A request under way: its slot, the prices of its snapshot, and what its body said for the ledger."""

    slot: int | None
    prices: Mapping[str, tuple[float, float] | None]
    user: str | None
    metadata: dict[str, Any] | None


class Recorder:
    """The rows of one worker."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._open: dict[str, _OpenRequest] = {}
        self._prices: Mapping[str, tuple[float, float] | None] = {}
        self._with_user = self._with_metadata = False

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Write by this snapshot's prices from now on; what is under way keeps those that it began with."""
        self._prices = {model.id: model.price for model in snapshot.models}
        self._with_user, self._with_metadata = snapshot.ledger_user, snapshot.ledger_metadata

    def start_request(self, id: str, started: float, endpoint: str, key: Key, model: Model, stream: bool, body: Mapping[str, Any]) -> None:
        """A request will use its model: were this process to die, control would know."""
        row = encode(UsageRow(id, started, endpoint, key.id, key.team, model.id, stream=stream, incomplete=LOST, labels=key.labels))
        self._open[id] = _OpenRequest(
            self._journal.open_slot(row),
            self._prices,
            _user(body.get("user")) if self._with_user else None,
            _metadata(body.get("metadata")) if self._with_metadata else None,
        )

    def record_request(self, record: RequestRecord) -> None:
        """A request is over. Those of no known key, and of routes that use no model, have no row."""
        under = self._open.pop(record.id, None)
        if record.key is not None and record.endpoint in _ENDPOINTS:
            self._journal.append(encode(self._row(record, record.key, under)))
        if under is not None and under.slot is not None:
            self._journal.clear_slot(under.slot)

    def _row(self, record: RequestRecord, key: Key, under: _OpenRequest | None) -> UsageRow:
        usage = record.usage
        told = usage or _NOTHING
        prices = self._prices if under is None else under.prices
        return UsageRow(
            record.id,
            record.started,
            record.endpoint,
            key.id,
            key.team,
            record.model,
            record.server,
            record.stream,
            record.status,
            record.code,
            record.incomplete,
            told.prompt if usage else None,
            told.completion if usage else None,
            told.cached if usage else None,
            told.reasoning if usage else None,
            _chunks(record),
            record.duration,
            record.first_token,
            record.queued,
            prices.get(record.model) if record.model else None,
            key.labels,
            under.user if under else None,
            under.metadata if under else None,
        )

    def save(self, folder: Path, stream: TextIO) -> None:
        """Control is gone: leave the next one what it had not taken, and what is under way and ends with this process. On a disk that
        takes nothing, the rows go to ``stream``."""
        reading, held = self._journal.read(), self._journal.open_rows()
        try:
            save(folder, reading.data, held)
        except OSError:
            write_out([*frames(reading.data), *held], stream)


def _chunks(record: RequestRecord) -> int:
    """Of a stream whose count is not known, or perhaps not that of all of it."""
    if record.gaps is None or record.gaps.are_counted or (record.incomplete is None and (record.usage is not None or record.status >= 400)):
        return 0
    return record.gaps.events - 1


def _user(value: object) -> str | None:
    return value[:USER_LIMIT].replace("\0", "") if isinstance(value, str) else None


def _metadata(value: object) -> dict[str, Any] | None:
    """The metadata if it is an object of a sensible size. PostgreSQL's texts cannot hold NUL."""
    if not isinstance(value, dict):
        return None
    text = msgspec.json.encode(value)
    return None if len(text) > _METADATA_LIMIT or _NUL.search(text) else value
