"""One JSON line per request, on standard output, never a key and never a prompt.

The rule: a request waits for no log. Lines gather in memory and a thread of their own writes them; when the
reader of the output stands still, lines are dropped and counted, and memory stays bounded.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.record import Record

_MAX_WAITING = 64  # batches that may wait for a slow reader; a batch is what one tick gathered
_MAX_LINES = 10_000  # lines that one batch may have
_PIPE_BUF = 4096
_PATIENCE = 2.0  # seconds


def line(record: Record) -> bytes:
    """A request as a line of JSON. Durations are in milliseconds; what is not known is left out."""
    usage = record.usage
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.started, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": record.id,
        "key": record.key,
        "user": record.user,
        "endpoint": record.endpoint,
        "model": record.model,
        "server": record.server,
        "status": record.status,
        "code": record.code,
        "stream": record.stream or None,
        "incomplete": record.incomplete,
        "request_bytes": record.request_bytes,
        "answer_bytes": record.answer_bytes,
        "prompt_tokens": usage.prompt if usage else None,
        "completion_tokens": usage.completion if usage else None,
        "cached_tokens": usage.cached if usage and usage.cached else None,
        "reasoning_tokens": usage.reasoning if usage and usage.reasoning else None,
        "retries": record.retries or None,
        "queue_ms": _milliseconds(record.queued),
        "first_byte_ms": _milliseconds(record.first_byte),
        "total_ms": _milliseconds(record.duration),
        "detail": record.detail,
    }
    return orjson.dumps({name: value for name, value in fields.items() if value is not None}, option=orjson.OPT_APPEND_NEWLINE)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


class AccessLog:
    """Gathers records; ``flush`` hands them to the writer."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._records: list[Record] = []
        self._waiting: queue.Queue[list[Record] | None] = queue.Queue(_MAX_WAITING)
        self.dropped = 0

    def add(self, record: Record) -> None:
        """Take a record; it is written with the next flush."""
        if len(self._records) < _MAX_LINES:
            self._records.append(record)
        else:
            self.dropped += 1

    def flush(self) -> None:
        """Hand over what has gathered; called a few times a second."""
        if not self._records:
            return
        try:
            self._waiting.put_nowait(self._records)
            self._records = []
        except queue.Full:
            pass  # they stay, up to the bound, until the writer gets on

    def write(self) -> None:
        """The writer's thread: until told to stop."""
        while (batch := self._waiting.get()) is not None:
            try:
                for lines in _pieces(map(line, batch)):
                    _write_all(self._output, lines)
            except OSError:
                self.dropped += len(batch)  # nobody reads the output, or its disk is full: serving goes on

    def stop(self, patience: float) -> None:
        """Write what is there and end the thread; an output that stands still is given so many seconds to move."""
        self.flush()
        try:
            self._waiting.put(None, timeout=patience)
        except queue.Full:
            pass  # the thread is a daemon and ends with the process


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines in pieces that a pipe takes at once, so that the lines of several relays never mix (pipe(7), PIPE_BUF)."""
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
    thread = threading.Thread(target=log.write, name="access-log", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        log.stop(_PATIENCE)
        thread.join(_PATIENCE)
