"""Write one JSON line for each request to standard output, never with a key or a prompt.

The rule: a request waits for no log. Lines are collected in memory, and a thread writes them. If stdout is blocked, or a line
cannot be encoded, lines are dropped and counted, and memory stays bounded.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.telemetry.request_record import RequestRecord

_MAX_WAITING = 64  # batches that may wait for a slow reader; a batch is what one tick gathered
_MAX_LINES = 10_000  # lines that one batch may have
_PIPE_BUF = 4096
_TIMEOUT = 2.0  # seconds
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger("vllm_gateway.worker")


class _Line(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The fields of a line in their order. Durations are in milliseconds; unknown values are omitted."""

    time: datetime
    request_id: str
    client: str | None = None
    key: str | None = None
    user: str | None = None
    endpoint: str
    method: str | None = None
    path: str | None = None
    model: str | None = None
    requested_model: str | None = None
    split: str | None = None
    server: str | None = None
    status: int
    code: str | None = None
    stream: bool = False
    incomplete: str | None = None
    request_bytes: int
    response_bytes: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    estimated_by: str | None = None
    retries: int = 0
    queue_ms: float
    first_byte_ms: float | None = None
    total_ms: float
    detail: str | None = None
    request: Mapping[str, Any] | None = None
    balance: Mapping[str, Any] | None = None


def line(record: RequestRecord) -> bytes:
    """Encode a request as a line of JSON."""
    usage, first_byte = record.usage, record.first_byte
    line = _Line(
        time=datetime.fromtimestamp(record.started, UTC),
        request_id=record.id,
        client=record.client,
        key=record.key.id if record.key else None,
        user=record.user,
        endpoint=record.endpoint,
        method=record.method,
        path=record.path,
        model=record.model,
        requested_model=record.requested_model,
        split=record.split,
        server=record.server,
        status=record.status,
        code=record.code,
        stream=record.stream,
        incomplete=record.incomplete,
        request_bytes=record.request_bytes,
        response_bytes=record.response_bytes,
        retries=record.retries,
        queue_ms=round(record.queued * 1000, 3),
        first_byte_ms=None if first_byte is None else round(first_byte * 1000, 3),
        total_ms=round(record.duration * 1000, 3),
        detail=record.detail,
        request=record.shape,
        balance=record.explanation,
    )
    if usage is not None:
        line.prompt_tokens, line.completion_tokens = usage.prompt, usage.completion
        line.cached_tokens, line.reasoning_tokens = usage.cached, usage.reasoning
        line.estimated_by = record.estimated_by
    return _encode(line) + b"\n"


class AccessLog:
    """Collects records; ``flush`` hands them to the writer thread."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._records: list[RequestRecord] = []
        self._waiting: queue.Queue[list[RequestRecord] | None] = queue.Queue(_MAX_WAITING)
        self._refused = 0  # the buffer was full; written by the event loop
        self._unwritten = 0  # written by the writer thread
        self._reported = 0

    @property
    def dropped(self) -> int:
        """Number of requests whose lines were not written."""
        return self._refused + self._unwritten

    def newly_dropped(self) -> int:
        """Return how many lines were dropped since the last call."""
        before, self._reported = self._reported, self.dropped
        return self._reported - before

    def add(self, record: RequestRecord) -> None:
        """Add a record; the next flush writes it."""
        if len(self._records) < _MAX_LINES:
            self._records.append(record)
        else:
            self._refused += 1

    def flush(self) -> None:
        """Hand the collected records to the writer; called a few times a second."""
        if not self._records:
            return
        try:
            self._waiting.put_nowait(self._records)
            self._records = []
        except queue.Full:
            pass  # they stay, up to the bound, until the writer continues

    def run_writer(self) -> None:
        """Write batches until the log is stopped. Runs in the writer thread."""
        while (batch := self._waiting.get()) is not None:
            written = 0
            try:
                for lines in _pieces(_encoded(batch)):
                    _write_all(self._output, lines)
                    written += lines.count(b"\n")
            except OSError:
                pass  # stdout is closed, or its disk is full; serving continues
            self._unwritten += len(batch) - written

    def stop(self, timeout: float) -> None:
        """Write what is left and end the thread; a blocked stdout gets this many seconds."""
        self.flush()
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            pass  # the thread is a daemon and ends with the process


def _encoded(batch: Iterable[RequestRecord]) -> Iterator[bytes]:
    for record in batch:
        try:
            yield line(record)
        except Exception:  # noqa: BLE001  the outer edge: a record that cannot be encoded must not end the log
            _log.exception("a line of the access log could not be encoded")


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join whole lines to pieces that a pipe takes at once, so that lines of several workers never mix (pipe(7), PIPE_BUF)."""
    piece = b""
    for each in lines:
        if piece and len(piece) + len(each) > _PIPE_BUF:
            yield piece
            piece = b""
        piece += each
    if piece:
        yield piece


def _write_all(output: int, data: bytes) -> None:
    while data:
        data = data[os.write(output, data) :]


@contextmanager
def access_log(output: int) -> Iterator[AccessLog]:
    """Yield an access log whose lines are written when the block ends, unless stdout is blocked."""
    log = AccessLog(output)
    thread = threading.Thread(target=log.run_writer, name="access-log", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        log.stop(_TIMEOUT)
        thread.join(_TIMEOUT)
