"""The running audit log: it appends entries to the journal, and delivers them from there to the table if there is one.

The rules: an entry is durable in the journal before ``record`` returns, and is removed from a journal that is a spool only after the
database has committed it. While the spool is full, no change is possible. Refused attempts, which any client can cause, have a rate limit;
those beyond it are counted in one entry. Standard output gets the lines of the log without a delay for anyone.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.access.actor import Actor
from gateway.audit.chain import Line, read_line
from gateway.audit.entry import AuditUnavailableError, Entry
from gateway.audit.journal import Journal, journal
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.telemetry.dependencies import Observation
from gateway.telemetry.metrics import Series
from upstream.backoff import Backoff

if TYPE_CHECKING:
    from gateway.audit.table import AuditTable

SPOOL_LIMIT = 64 * 1024 * 1024
"""Bytes of entries that may wait for the database: about a hundred thousand."""
_CHECKPOINT_EVERY = 60.0  # seconds between two checkpoints in the log
_PAUSES = 1.0, 15.0  # seconds before the database is tried again, at first and at most
_BURST, _PER_SECOND = 100, 1.0  # refused attempts that are recorded
_MAX_WAITING = 1000  # lines that may wait for standard output
_STOP_TIMEOUT = 5.0  # seconds for the database at the end; what is left stays in the spool
_TAIL = 64 * 1024  # bytes of the journal's last lines
MOST_RECENT = 100
"""The changes that are kept in memory."""
_GATEWAY = Actor("gateway", "", None)
_log = logging.getLogger("vllm_gateway.audit")


@dataclass(frozen=True, slots=True)
class Where:
    """Where the log is. ``file`` is the journal, and ``folder`` has its checkpoint. With a ``table`` the journal is its spool."""

    file: Path
    folder: Path
    table: AuditTable | None = None


class AuditLog:
    """Implements ``Audit``, at ``where``.

    ``key`` is that of the HMACs. ``output`` is the descriptor that gets the lines too, None for none. The counts are since control started.
    """

    def __init__(self, opened: Journal, key: bytes, where: Where, output: int | None) -> None:
        self.where = where
        self._journal = opened
        self.key = key
        self._table = table = where.table
        self._printer = None if output is None else _Printer(output)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._bucket = _Bucket(_BURST, _PER_SECOND, time.monotonic)
        self._counts = {"recorded": 0, "failed": 0, "suppressed": 0}
        self._unreported = 0  # suppressed attempts without an entry
        self._error: str | None = None
        self._undelivered: str | None = None
        self._delivered = 0  # bytes of the spool that are in the table
        self._waiting = len(opened.read(0)) if table is not None else 0
        self._recent: deque[bytes] = deque(maxlen=MOST_RECENT)
        self._logged_checkpoint = self._start = opened.checkpoint
        self._before_start = opened.read(max(opened.size - _TAIL, 0))

    # Recording

    def check(self) -> None:
        """Raise AuditUnavailableError if an entry could not be recorded now."""
        with self._lock:
            self._journal.check()
        if self._error is not None:
            self.record(Entry("audit.retry", _GATEWAY, "", "", None, {"reason": self._error}))  # nothing else shows whether it works again

    def record(self, entry: Entry) -> None:
        """Record a change. Returns when the entry is durable. Raises AuditUnavailableError."""
        with self._lock:
            try:
                data = self._journal.append(entry, datetime.now(UTC))
            except AuditUnavailableError as error:
                self._counts["failed"] += 1
                if self._error is None:
                    _log.error("the audit log cannot be written: %s", error)
                self._error = str(error)
                raise
            self._error = None
            if not entry.action.endswith(".refused"):
                self._recent.append(data)
            self._waiting += 1
            self._counts["recorded"] += 1
            if self._printer is not None:
                self._printer.add(data)
        self._wake.set()

    def record_refused(self, entry: Entry) -> None:
        """Record a refused attempt, if there were not too many of them."""
        if not self._bucket.take():
            self._suppress()
            return
        try:
            self.record(entry)
        except (AuditUnavailableError, ValueError, TypeError):  # a value that JSON does not have
            self._suppress()

    def _suppress(self) -> None:
        with self._lock:
            self._counts["suppressed"] += 1
            self._unreported += 1
        self._wake.set()

    @property
    def recorded(self) -> int:
        """The number of entries since control started."""
        return self._counts["recorded"]

    def recent(self, since: datetime) -> list[Line]:
        """Return the changes since a time, the newest first, at most ``MOST_RECENT``. Raises DatabaseUnavailableError."""
        with self._lock:
            known = [line for line in map(read_line, reversed(self._recent)) if line is not None]
        before = (line for line in self.before_start() if not line.action.endswith(".refused"))
        return list(islice(takewhile(lambda line: line.time >= since, chain(known, before)), MOST_RECENT))

    def before_start(self) -> Iterator[Line]:
        """Yield the last lines of this chain from before the start, the newest first. Raises DatabaseUnavailableError."""
        waiting = [line for line in map(read_line, self._before_start) if line is not None and line.chain == self._start.chain]
        yield from reversed(waiting)
        if self._table is not None:
            first = waiting[0].seq if waiting else self._start.seq + 1
            yield from filter(None, map(read_line, self._table.read_before(self._start.chain, first)))

    # The thread

    def run(self) -> None:
        """Deliver entries, and write checkpoints to the log, until ``stop``. Runs in the log's thread."""
        backoff, due = Backoff(*_PAUSES), time.monotonic() + _CHECKPOINT_EVERY
        while not self._stopping.is_set():
            self._report_suppressed()
            if not self._deliver():
                self._stopping.wait(backoff.next_pause())
            else:
                backoff.reset()
                self._wake.wait(max(due - time.monotonic(), 0.0))
            self._wake.clear()
            if time.monotonic() >= due:
                due = time.monotonic() + _CHECKPOINT_EVERY
                self.log_checkpoint()
        self._deliver()

    def stop(self) -> None:
        """End ``run``."""
        self._stopping.set()
        self._wake.set()

    def log_checkpoint(self) -> None:
        """Write the signed checkpoint to the log if it has moved. A copy of the log elsewhere shows then that entries were removed."""
        checkpoint = self._journal.checkpoint
        if checkpoint != self._logged_checkpoint:
            self._logged_checkpoint = checkpoint
            _log.info("%s", checkpoint.signed(self.key))

    def _report_suppressed(self) -> None:
        with self._lock:
            count = self._unreported
        if count and self._bucket.take():
            try:
                self.record(Entry("audit.suppressed", _GATEWAY, "", "", None, {"refused_attempts": count}))
            except AuditUnavailableError:
                return
            with self._lock:
                self._unreported -= count

    def _deliver(self) -> bool:
        """Write waiting entries to the table. Returns whether all of them are written."""
        if self._table is None:
            return True
        try:
            with self._lock:
                size = self._journal.size
                lines = self._journal.read(min(self._delivered, size))
            if lines:
                self._table.write(lines)
                self._delivered = size
            with self._lock:
                self._waiting -= len(lines)
                if self._delivered and self._journal.clear(self._delivered):
                    self._delivered = 0
        except (DatabaseUnavailableError, OSError) as error:
            if self._undelivered is None:
                _log.error("entries of the audit log wait on disk: %s", error)
            self._undelivered = str(error)
            return False
        if self._undelivered is not None:
            _log.warning("the audit log's entries are in the database again")
        self._undelivered = None
        return True

    # Reports

    def series(self) -> dict[Series, Sequence[float]]:
        """Return the series for Prometheus."""
        series: dict[Series, Sequence[float]] = {
            Series("audit_entries_total", (outcome,)): (count,) for outcome, count in self._counts.items()
        }
        if self._table is not None:
            series |= {Series("audit_spool_entries", ()): (self._waiting,), Series("audit_spool_bytes", ()): (self._journal.size,)}
        if self._printer is not None:
            series[Series("audit_lines_dropped_total", ())] = (self._printer.dropped,)
        return series

    def dependencies(self) -> Iterator[Observation]:
        """Yield whether entries can be written, and reach the database."""
        yield Observation("audit_log", error=self._error or self._undelivered)


class _Bucket:
    """A token bucket. ``clock`` returns seconds."""

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._left, self._at = burst, clock()

    def take(self) -> bool:
        """Return whether there was a token."""
        with self._lock:
            now = self._clock()
            self._left, self._at = min(self._left + (now - self._at) * self._per_second, self._burst), now
            if self._left < 1:
                return False
            self._left -= 1
            return True


class _Printer:
    """Writes lines to a descriptor from its own thread, and drops them while it is blocked."""

    def __init__(self, output: int) -> None:
        self.dropped = 0
        self._output = output
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_WAITING)
        threading.Thread(target=self._run, name="audit-printer", daemon=True).start()

    def add(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while True:
            left = memoryview(self._lines.get() + b"\n")
            try:
                while left:
                    left = left[os.write(self._output, left) :]
            except OSError:
                self.dropped += 1


@contextmanager
def running(where: Where, key: bytes, output: int | None, started: Entry) -> Iterator[AuditLog]:
    """Run the log for the length of the block, with an entry about its start and its end.

    Raises JournalLockedError, and OSError if the journal cannot be opened.
    """
    with ExitStack() as stack:
        if where.table is not None:
            stack.enter_context(closing(where.table))
        limit = None if where.table is None else SPOOL_LIMIT
        log = AuditLog(stack.enter_context(journal(where.file, where.folder, key, limit)), key, where, output)
        log.record_refused(started)  # a full disk must not keep the gateway from serving
        log.log_checkpoint()
        thread = threading.Thread(target=log.run, name="audit-log", daemon=True)
        thread.start()
        try:
            yield log
        finally:
            log.record_refused(Entry("gateway.stop", _GATEWAY, "", "", None, None))
            log.log_checkpoint()
            log.stop()
            thread.join(_STOP_TIMEOUT)
