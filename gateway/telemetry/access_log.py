"""Write one JSON line for each request to standard output, never with a key or a prompt.

The rule: a request waits for no log. Lines are collected in memory, and a thread writes them. If stdout is blocked, or a line
cannot be encoded, lines are dropped and counted, and memory stays bounded. A line is encoded when its request ends: a thread that encodes
the lines of many requests at once competes with the event loop for the interpreter, and delays all requests (docs/performance.md).
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import asdict

from gateway.telemetry.request_record import Continuation, RequestRecord, requested_model

_MAX_WAITING = 64  # batches that may wait for a slow reader; a batch is what one tick gathered
_MAX_LINES = 10_000  # lines that one batch may have
_PIPE_BUF = 4096
_FILE_PIECE = 1 << 20  # bytes that are written to a file at once
_TIMEOUT = 2.0  # seconds
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger("vllm_gateway.worker")


class _Line(msgspec.Struct, omit_defaults=True, gc=False):
    """The fields of a line in their order. Durations are in milliseconds; unknown values are omitted.

    A default of "" or -1 is the value of no request: such a field is never omitted.
    """

    time: datetime
    request_id: str
    client: str | None = None
    key: str | None = None
    user: str | None = None
    endpoint: str = ""
    method: str | None = None
    path: str | None = None
    model: str | None = None
    requested_model: str | None = None
    split: str | None = None
    server: str | None = None
    status: int = -1
    code: str | None = None
    param: str | None = None
    stream: bool = False
    incomplete: str | None = None
    request_bytes: int = -1
    response_bytes: int = -1
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    estimated_by: str | None = None
    retries: int = 0
    continuations: Sequence[Mapping[str, Any]] = ()
    queue_ms: float = -1.0
    queue_reason: str | None = None
    first_byte_ms: float | None = None
    total_ms: float = -1.0
    detail: str | None = None
    request: Mapping[str, Any] | None = None
    balance: Mapping[str, Any] | None = None


def line(record: RequestRecord) -> bytes:
    """Encode a request as a line of JSON."""
    key, usage, first_byte = record.key, record.usage, record.first_byte
    # A few fields by name. With all of them by name it would take three times as long.
    line = _Line(
        datetime.fromtimestamp(record.started, UTC),
        record.id,
        record.client,
        None if key is None else key.id,
        record.user,
        record.endpoint,
        model=record.model,
        requested_model=record.requested_model,
        split=record.split,
        server=record.server,
        status=record.status,
        stream=record.stream,
        incomplete=record.incomplete,
        request_bytes=record.request_bytes,
        response_bytes=record.response_bytes,
    )
    if record.path is not None:
        line.method, line.path = record.method, record.path
    if usage is not None:
        line.prompt_tokens = usage.prompt
        line.completion_tokens = usage.completion
        line.cached_tokens = usage.cached
        line.reasoning_tokens = usage.reasoning
        line.estimated_by = record.estimated_by
    line.retries = record.retries
    if record.queued:
        line.queue_ms, line.queue_reason = _milliseconds(record.queued), record.queue_reason
    else:
        line.queue_ms = 0.0
    line.total_ms = _milliseconds(record.duration)
    if first_byte is not None:
        line.first_byte_ms = _milliseconds(first_byte)
    if record.shape is not None:
        line.request = record.shape
    if record.explanation is not None:
        line.balance = record.explanation
    if record.continuations:
        line.continuations = [_shown(each) for each in record.continuations]
    if record.code is not None:
        line.code, line.param, line.detail = record.code, record.param, record.detail
        line.requested_model = requested_model(record)
    return _encode(line) + b"\n"


def _shown(each: Continuation) -> dict[str, Any]:
    """Return a continuation as it is logged. Unknown values are omitted."""
    shown = {name: value for name, value in asdict(each).items() if name not in ("gap", "at") and value is not False}
    return shown | ({} if each.gap is None else {"gap_ms": _milliseconds(each.gap)})


def _milliseconds(seconds: float) -> float:
    """Convert to milliseconds with three digits, as ``round`` does, in a third of its time."""
    return int(seconds * 1e6 + 0.5) / 1000


class AccessLog:
    """Collects lines; ``flush`` hands them to the writer thread."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._lines: list[bytes] = []
        self._waiting: queue.Queue[list[bytes] | None] = queue.Queue(_MAX_WAITING)
        self._refused = 0  # the buffer was full, or a line could not be encoded; written by the event loop
        self._unwritten = 0  # written by the writer thread

    @property
    def dropped(self) -> int:
        """Number of requests whose lines were not written."""
        return self._refused + self._unwritten

    def add(self, record: RequestRecord) -> None:
        """Add a request; the next flush writes its line."""
        if len(self._lines) >= _MAX_LINES:
            self._refused += 1
            return
        try:
            self._lines.append(line(record))
        except Exception:  # noqa: BLE001  the outer edge: a record that cannot be encoded must not end the log, or its request
            self._refused += 1
            _log.exception("a line of the access log could not be encoded")

    def flush(self) -> None:
        """Hand the collected lines to the writer; called a few times a second."""
        if self._lines:
            with suppress(queue.Full):  # they stay, up to the bound, until the writer continues
                self._waiting.put_nowait(self._lines)
                self._lines = []

    def run_writer(self) -> None:
        """Write batches until the log is stopped. Runs in the writer thread."""
        most = _piece_size(self._output)
        while (batch := self._waiting.get()) is not None:
            written = 0
            with suppress(OSError):  # stdout is closed, or its disk is full; serving continues
                for lines in _pieces(batch, most):
                    _write_all(self._output, lines)
                    written += lines.count(b"\n")
            self._unwritten += len(batch) - written

    def stop(self, timeout: float) -> None:
        """Write what is left and end the thread; a blocked stdout gets this many seconds."""
        self.flush()
        with suppress(queue.Full):  # the thread is a daemon and ends with the process
            self._waiting.put(None, timeout=timeout)


def _piece_size(output: int) -> int:
    """Return the most bytes to write at once, so that lines of several workers never mix: a pipe takes ``PIPE_BUF`` (pipe(7))."""
    try:
        return _FILE_PIECE if stat.S_ISREG(os.fstat(output).st_mode) else _PIPE_BUF
    except OSError:
        return _PIPE_BUF  # closed


def _pieces(lines: Sequence[bytes], most: int) -> Iterator[bytes]:
    """Join whole lines (at least one) to pieces of at most this size; a longer line is a separate piece."""
    piece: list[bytes] = []
    size = 0
    for each in lines:
        if piece and size + len(each) > most:
            yield b"".join(piece)
            piece, size = [], 0
        piece.append(each)
        size += len(each)
    yield b"".join(piece)


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
