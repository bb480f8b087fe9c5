"""One JSON line per request, on standard output, never a key and never a prompt.

The rule: a request waits for no log. Lines gather in memory and a thread of their own writes them; when the
reader of the output stands still, or a line cannot be made, lines are dropped and counted, and memory stays bounded.
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
_PATIENCE = 2.0  # seconds
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger("vllm_gateway.worker")


class _Line(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The members of a line, in their order. Durations are in milliseconds; what is not known is left out."""

    time: datetime
    request_id: str
    client: str | None = None
    key: str | None = None
    user: str | None = None
    endpoint: str
    method: str | None = None
    path: str | None = None
    model: str | None = None
    asked: str | None = None
    server: str | None = None
    status: int
    code: str | None = None
    stream: bool = False
    incomplete: str | None = None
    request_bytes: int
    answer_bytes: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    retries: int = 0
    queue_ms: float
    first_byte_ms: float | None = None
    total_ms: float
    detail: str | None = None
    request: Mapping[str, Any] | None = None


def line(record: RequestRecord) -> bytes:
    """A request as a line of JSON."""
    usage, first_byte = record.usage, record.first_byte
    made = _Line(
        time=datetime.fromtimestamp(record.started, UTC),
        request_id=record.id,
        client=record.client,
        key=record.key.id if record.key else None,
        user=record.user,
        endpoint=record.endpoint,
        method=record.method,
        path=record.path,
        model=record.model,
        asked=record.asked,
        server=record.server,
        status=record.status,
        code=record.code,
        stream=record.stream,
        incomplete=record.incomplete,
        request_bytes=record.request_bytes,
        answer_bytes=record.answer_bytes,
        retries=record.retries,
        queue_ms=round(record.queued * 1000, 3),
        first_byte_ms=None if first_byte is None else round(first_byte * 1000, 3),
        total_ms=round(record.duration * 1000, 3),
        detail=record.detail,
        request=record.shape,
    )
    if usage is not None:
        made.prompt_tokens, made.completion_tokens = usage.prompt, usage.completion
        made.cached_tokens, made.reasoning_tokens = usage.cached, usage.reasoning
    return _encode(made) + b"\n"


class AccessLog:
    """Gathers records; ``flush`` hands them to the writer."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._records: list[RequestRecord] = []
        self._waiting: queue.Queue[list[RequestRecord] | None] = queue.Queue(_MAX_WAITING)
        self._refused = 0  # for lack of room: counted by whoever adds
        self._unwritten = 0  # counted by the writer
        self._reported = 0

    @property
    def dropped(self) -> int:
        """Requests whose lines are written nowhere."""
        return self._refused + self._unwritten

    def newly_dropped(self) -> int:
        """How many there are more than at the last call."""
        before, self._reported = self._reported, self.dropped
        return self._reported - before

    def add(self, record: RequestRecord) -> None:
        """Take a record; it is written with the next flush."""
        if len(self._records) < _MAX_LINES:
            self._records.append(record)
        else:
            self._refused += 1

    def flush(self) -> None:
        """Hand over what has gathered; called a few times a second."""
        if not self._records:
            return
        try:
            self._waiting.put_nowait(self._records)
            self._records = []
        except queue.Full:
            pass  # they stay, up to the bound, until the writer gets on

    def run_writer(self) -> None:
        """The writer's thread: until told to stop."""
        while (batch := self._waiting.get()) is not None:
            written = 0
            try:
                for lines in _pieces(_made(batch)):
                    _write_all(self._output, lines)
                    written += lines.count(b"\n")
            except OSError:
                pass  # nobody reads the output, or its disk is full: serving goes on
            self._unwritten += len(batch) - written

    def stop(self, patience: float) -> None:
        """Write what is there and end the thread; an output that stands still is given so many seconds to move."""
        self.flush()
        try:
            self._waiting.put(None, timeout=patience)
        except queue.Full:
            pass  # the thread is a daemon and ends with the process


def _made(batch: Iterable[RequestRecord]) -> Iterator[bytes]:
    for record in batch:
        try:
            yield line(record)
        except Exception:  # noqa: BLE001  the outer edge: one that cannot be told must not end the log of all others
            _log.exception("a line of the access log")


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines in pieces that a pipe takes at once, so that the lines of several workers never mix (pipe(7), PIPE_BUF)."""
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
    """An access log whose lines have been written when the block ends, unless the output stands still."""
    log = AccessLog(output)
    thread = threading.Thread(target=log.run_writer, name="access-log", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        log.stop(_PATIENCE)
        thread.join(_PATIENCE)
