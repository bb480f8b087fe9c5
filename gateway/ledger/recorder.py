"""Record usage in a worker: build and update a request's row, from its start to its end.

The rule: a request never waits for the ledger. A row is a few hundred bytes in shared memory. If control does not read them in
time, rows are dropped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec
from msgspec.structs import replace

from gateway.api.routes import ENDPOINTS
from gateway.api.vllm.lax_int import lax_int
from gateway.ledger.continued_rows import rows_of_servers
from gateway.ledger.journal import Journal
from gateway.ledger.last_resort import write_out
from gateway.ledger.rejections import RejectionSample
from gateway.ledger.row import LOST, UsageRow, encode, frames
from gateway.ledger.spool import save
from gateway.limits.end_users import header_text
from gateway.snapshot.money import Price
from gateway.snapshot.snapshot import Key, Model, Snapshot
from gateway.telemetry.request_record import USER_LIMIT, RequestRecord, requested_model
from upstream.http.deadlines import TICK, visit_in_slices

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # in JSON; after another backslash it is six characters of text
_TEXT_LIMIT = 512  # characters that are stored of an error's details and of the list of failed servers
_METADATA_LIMIT = 16 * 1024  # bytes of `metadata`; OpenAI's own bounds are below
_ENDPOINTS = frozenset(ENDPOINTS)
_WITH_CHOICES = frozenset({"/v1/chat/completions", "/v1/completions"})  # elsewhere `n` is ignored
_MOST_CHOICES = 2**31 - 1  # of an integer column


class OpenStream(Protocol):
    """A stream that is being relayed."""

    def usage_tail(self) -> bytes:
        """Return the tokens that were sent so far as a usage tail; empty if they are not known."""


class _OpenRequest(msgspec.Struct, frozen=True, gc=False):
    """An open request: its slot, the prices of its snapshot, and its row."""

    slot: int | None
    prices: Mapping[str, Price | None]
    row: UsageRow


class Recorder:
    """Records the rows of one worker."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._open: dict[str, _OpenRequest] = {}
        self._streams: dict[int, OpenStream] = {}  # by slot
        self._tails: dict[int, bytes] = {}  # what the slots hold
        self._prices: Mapping[str, Price | None] = {}
        self.rejections = RejectionSample()
        """The requests without a valid key since the last tick."""
        self._with_user = self._reads_user = self._with_metadata = False

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Use this snapshot's prices for new requests. Open requests keep theirs."""
        self._prices = {model.id: model.price for model in snapshot.models}
        self._with_user, self._with_metadata = snapshot.ledger_user, snapshot.ledger_metadata
        self._reads_user = snapshot.ledger_user or snapshot.has_store or any(key.user_header is not None for key in snapshot.keys)

    def start_request(
        self,
        id: str,
        started: float,
        endpoint: str,
        key: Key,
        model: Model,
        stream: bool,
        body: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
    ) -> None:
        """Store a row for a request that starts, in case this process dies before the request ends."""
        user = self._end_user(key, body, headers) if self._reads_user else None
        row = UsageRow(
            id, started, endpoint, key.id, key.team, model.id,
            stream=stream, incomplete=LOST, price=self._prices.get(model.id), labels=key.labels, user=user
        )  # fmt: skip
        slot = self._journal.open_slot(encode(row))
        if slot is None and user is not None:  # a slot may be too small for the name of the user as well
            slot = self._journal.open_slot(encode(replace(row, user=None)))
        if self._with_metadata:  # not in the slot, for which it may be too large
            row.metadata = _metadata(body.get("metadata"))
        if "n" in body and endpoint in _WITH_CHOICES:
            row.choices = _choices(body["n"])
        self._open[id] = _OpenRequest(slot, self._prices, row)

    def _end_user(self, key: Key, body: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str | None:
        """Return the end user: the key's header names it, or the body if the configuration allows that."""
        named = headers.get(key.user_header) if key.user_header is not None else None
        if named:
            return _user(header_text(named))
        return _user(body.get("user")) if self._with_user else None

    def watch(self, id: str, stream: OpenStream) -> None:
        """Store what a stream has used a few times a second, in case this process dies before the stream ends."""
        open_request = self._open.get(id)
        if open_request is not None and open_request.slot is not None:
            self._streams[open_request.slot] = stream

    def tick(self) -> None:
        """Update the slots of the streams that have sent something since the last tick, and report rejected requests."""
        self.rejections.flush()
        visit_in_slices(tuple(self._streams), TICK, self._update_slots)

    def _update_slots(self, slots: Sequence[int]) -> None:
        streams, tails = self._streams, self._tails
        for slot in slots:
            if (stream := streams.get(slot)) is None:
                continue  # it has ended
            tail = stream.usage_tail()
            if tail != tails.get(slot, b""):
                tails[slot] = tail
                self._journal.update_slot(slot, tail)

    def record_request(self, record: RequestRecord) -> None:
        """Append the row of a finished request. A request of a route without a model has no row.

        A request without a valid key has none either: its client could fill the disk. Some of them are reported to control.
        """
        open_request = self._open.pop(record.id, None)
        if record.endpoint in _ENDPOINTS:
            if record.key is not None:
                self._journal.append(encode(row := self._row(record, record.key, open_request)))
                if record.continuations:
                    for each in rows_of_servers(row, record.continuations):
                        self._journal.append(encode(each))
            elif record.code is not None:
                self.rejections.add(record)
        if open_request is not None and (slot := open_request.slot) is not None:
            if slot in self._streams:
                del self._streams[slot]
                if self._tails.pop(slot, b""):
                    self._journal.update_slot(slot, b"")
            self._journal.clear_slot(slot)

    def record_mirrored(self, row: UsageRow, choices: object) -> None:
        """Append the row of the copy of a request. ``choices``: the request's ``n``. The reconciliation needs the row."""
        if row.endpoint in _WITH_CHOICES:
            row.choices = _choices(choices)
        self._journal.append(encode(row))

    def _row(self, record: RequestRecord, key: Key, open_request: _OpenRequest | None) -> UsageRow:
        """Return the row of a finished request: the row that it had when it started, or else a new one, with what is known now."""
        if open_request is None:
            prices, row = self._prices, UsageRow(record.id, record.started, record.endpoint, key.id, key.team, labels=key.labels)
        else:
            prices, row = open_request.prices, open_request.row
        row.model = record.model
        row.server = record.server
        row.stream = record.stream
        row.status = record.status
        row.incomplete = record.incomplete
        if (usage := record.usage) is not None:
            row.prompt = usage.prompt
            row.completion = usage.completion
            row.cached = usage.cached
            row.reasoning = usage.reasoning
        row.duration = record.duration
        row.first_token = record.first_token
        row.queued = record.queued
        row.price = prices.get(record.model) if record.model else None
        row.estimated_by = record.estimated_by
        row.reason = record.reason or record.incomplete
        row.nearest_limit = record.nearest_limit
        if record.continuations:
            row.continuations = _printable(", ".join(map(str, record.continuations)))
        if record.trace is not None and record.trace.sampled:
            row.trace_id = record.trace.trace_id
        if record.code is not None:
            row.code, row.param, row.requested_model = record.code, record.param, requested_model(record)
            row.limit_holder = record.limit_holder
            row.detail = None if record.detail is None else _printable(record.detail)
        if record.failures:
            row.retries = record.retries or None
            row.failures = _printable(", ".join(f"{server} {reason}" for _, server, reason in record.failures))
        return row

    def save(self, folder: Path, stream: TextIO) -> None:
        """Save the unread and open rows for the next gateway, because control has exited.

        If the disk accepts nothing, the rows are written to ``stream``.
        """
        self.tick()
        reading, held = self._journal.read(), self._journal.open_rows()
        try:
            save(folder, reading.data, held)
        except OSError:
            write_out([*frames(reading.data), *held], stream)


def _user(value: object) -> str | None:
    return value[:USER_LIMIT].replace("\0", "") if isinstance(value, str) else None


def _printable(text: str) -> str:
    """Return a bounded text that every database stores. Only the text of an error is converted, so ordinary requests pay nothing."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_TEXT_LIMIT])


def _choices(value: object) -> int | None:
    """Return the number of choices, None for one, which most requests have."""
    number = value if type(value) is int else lax_int(value)
    return number if number is not None and 1 < number <= _MOST_CHOICES else None


def _metadata(value: object) -> dict[str, Any] | None:
    """Return the metadata if it is an object of a sensible size. PostgreSQL text cannot contain NUL."""
    if not isinstance(value, dict):
        return None
    text = msgspec.json.encode(value)
    return None if len(text) > _METADATA_LIMIT or _NUL.search(text) else value
