"""Move rows from the workers' journals to the spool, and from the spool to the database: two threads of control.

The rules: neither thread waits for the other, so a hanging database does not prevent control from reading the journals. Rows are released
in a journal when they are synced to the spool, and deleted in the spool when the database has committed them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from gateway import config as conf
from gateway.config.source import reason
from gateway.ledger import last_resort
from gateway.ledger.engine_samples import PendingSamples
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.journal import Journal
from gateway.ledger.rejections import RecentRejections
from gateway.ledger.row import UsageRow, decode, frame, frames
from gateway.ledger.spool import Segment, Spool
from gateway.ledger.store import UsageStore, database_url
from gateway.telemetry.dependencies import Observation
from gateway.telemetry.metrics import Series
from upstream.backoff import Backoff

_COLLECT_EVERY = 0.25  # seconds between two reads of the journals
_BUSY = 500  # rows of a delivery after which rows are gathered for the next one: see ``_is_gathering``
_PAUSES = 1.0, 15.0  # seconds before the database is tried again, at first and at most
_PRUNE_EVERY = 600.0
_IDLE_WAIT = 1.0  # seconds between two scans for rows that workers of a dead gateway saved
_SAMPLE_DELAY = 1.0  # seconds after which the rows of requests before a sample have left the journals
_PROBE_EVERY = 1.0  # seconds between two probes of a failed disk
_LOG_EVERY = 60.0
_STOP_TIMEOUT = 5.0  # seconds for the database at the end; the remaining rows stay in the spool
_log = logging.getLogger("vllm_gateway.ledger")


class Ledger:
    """The running ledger. The counts are of rows, since control started."""

    def __init__(
        self, journals: Sequence[Journal], spooled: Spool, store: UsageStore, retention: float | None, samples: PendingSamples
    ) -> None:
        self.journals = journals
        self.samples = samples
        self.folder = spooled.folder
        self.rejections = RecentRejections()
        """Requests without a valid key, which have no rows."""
        self.engine = store.engine
        """The engine of the database, from which ``gateway.usage`` reads."""
        self.unbilled: dict[tuple[str, str], int] = {}
        """Tokens that engines have counted and that are not billed, by model and class, since control started."""
        self._spool = spooled
        self._store = store
        self._retention = retention
        self._orphaned: deque[bytes] = deque()  # open rows of workers that died
        self._stopping = threading.Event()
        self._collected = threading.Event()
        self._new_rows = threading.Event()
        self._counting = threading.Lock()
        self._next_log: dict[str, float] = {}
        self._prune_at = 0.0
        self._gather_until = 0.0
        self._delivered_until = 0.0  # seconds since the epoch: all rows that had reached the spool are in the database
        self._unfit = 0
        self.earlier_deliveries = 0
        """Files of an earlier gateway whose rows were written to the database."""
        self.written = 0
        self.lost = 0
        self.unavailable: str | None = None
        self._tried = False  # the database was tried at least once
        self._disk: str | None = None  # why the spool accepts no rows
        self._both: str | None = None  # why the database accepts none either, while rows wait in memory
        self._probe_at = 0.0

    @property
    def dropped(self) -> int:
        """Rows that will never be in the database: for lack of space, because it cannot store them, or because the disk lost them."""
        return self._spool.dropped + self._unfit + sum(journal.dropped for journal in self.journals)

    def series(self) -> dict[Series, Sequence[float]]:
        """Return the series for Prometheus."""
        rows, size = self._in_memory()
        outcomes = {"written": self.written, "lost": self.lost, "dropped": self.dropped}
        return {
            **{Series("ledger_rows_total", (outcome,)): (count,) for outcome, count in outcomes.items()},
            Series("ledger_spool_rows", ()): (self._spool.rows,),
            Series("ledger_spool_bytes", ()): (self._spool.size,),
            Series("ledger_memory_rows", ()): (rows,),
            Series("ledger_memory_bytes", ()): (size,),
            **{Series("unbilled_tokens_total", labels): (tokens,) for labels, tokens in self.unbilled.items()},
        }

    def _in_memory(self) -> tuple[int, int]:
        """Return the number of rows that are neither on disk nor in the database yet, and their bytes."""
        rows = sum(journal.waiting_rows for journal in self.journals) + len(self._orphaned)
        return rows, sum(journal.waiting_bytes for journal in self.journals) + sum(map(len, tuple(self._orphaned)))

    def status(self) -> dict[str, Any]:
        """Return the state for /status; ``unavailable`` is why the database accepts no rows, or None."""
        rows, size = self._in_memory()
        return {
            "unavailable": self.unavailable or self._both,
            "waiting_rows": self._spool.rows + rows,
            "waiting_bytes": self._spool.size + size,
            "memory_rows": rows,
            "memory_bytes": size,
            "dropped_rows": self.dropped,
        }

    def dependencies(self) -> Iterator[Observation]:
        """Yield whether the database and the spool accept rows; nothing for a database that was not tried yet."""
        if self._tried:
            yield Observation("ledger_database", error=self.unavailable or self._both)
        yield Observation("ledger_spool", error=self._disk)

    @property
    def has_earlier_rows(self) -> bool:
        """Whether the spool has files of an earlier gateway, whose rows may be missing in the database."""
        return self._spool.inherited > 0

    def worker_gone(self, number: int) -> None:
        """Record a worker's open requests as lost, because its process has ended."""
        journal = self.journals[number]
        held = journal.open_rows()
        journal.clear_slots()
        self._orphaned.extend(held)

    def stop(self) -> None:
        """Collect what the journals still hold, and stop."""
        self._stopping.set()
        self._new_rows.set()

    # The first thread

    def collect(self) -> None:
        """Move rows from the journals to the disk until stopped. Runs in the first thread."""
        while not self._stopping.wait(_COLLECT_EVERY):
            self._collect_safely()
        self._collect_safely()
        self._collected.set()
        self._new_rows.set()

    def _collect_safely(self) -> None:
        try:
            self._collect_once()
        except Exception:  # noqa: BLE001  the outer edge: this thread must not end
            _log.exception("the ledger could not collect the workers' rows; it retries")

    def _collect_once(self) -> None:
        lost = tuple(self._orphaned)  # before the rings: a row that is in both is complete in the rings
        readings = [journal.read() for journal in self.journals]
        data = b"".join(reading.data for reading in readings) + b"".join(map(frame, lost))
        if not data:
            self._both = None
            self._probe_the_disk()
            return
        rows = sum(reading.rows for reading in readings) + len(lost)
        if not self._store_frames(data, rows):
            return
        for journal, reading in zip(self.journals, readings, strict=True):
            journal.release(reading)
        for _ in lost:
            self._orphaned.popleft()
        self.lost += len(lost)
        self._new_rows.set()
        if self.dropped:
            self._log_limited("dropped", f"the ledger has dropped {self.dropped} rows so far")

    def _store_frames(self, data: bytes, rows: int) -> bool:
        """Store frames in the spool, or in the database if the disk fails. Returns False if neither accepts them."""
        try:
            self._spool.append(data, rows)
            self._disk_recovered()
            return True
        except OSError as error:
            self._disk = reason(error)
            self._log_limited("disk", f"the ledger's spool cannot be written; usage goes directly to the database: {error}")
        try:
            self._write(list(frames(data)))
        except DatabaseUnavailableError as error:
            self._both = str(error)
            self._log_limited("both", f"the ledger has neither its disk nor its database; usage waits in memory: {error}")
            return False
        if self._both is not None:
            self._log_recovery("both", "the ledger's database accepts rows again")
        self._both = None
        return True

    def _disk_recovered(self) -> None:
        """Log that the spool accepts rows again."""
        if self._disk is not None:
            self._log_recovery("disk", "the ledger's spool can be written again")
        self._disk = self._both = None
        self._next_log.pop("both", None)

    def _probe_the_disk(self) -> None:
        """Check whether a failed spool accepts rows again, if there are no rows to write."""
        if self._disk is None or time.monotonic() < self._probe_at:
            return
        self._probe_at = time.monotonic() + _PROBE_EVERY
        try:
            self._spool.probe()
        except OSError as error:
            self._disk = reason(error)
        else:
            self._disk_recovered()

    def write_out(self, stream: TextIO) -> None:
        """Write rows that are neither on disk nor in the database to the stream, and log how many stay in the spool."""
        if left := [*[payload for journal in self.journals for payload in frames(journal.read().data)], *self._orphaned]:
            last_resort.write_out(left, stream)
        if self._spool.rows:
            _log.warning("%d rows of the ledger stay in %s until the next start", self._spool.rows, self.folder)

    # The second thread

    def deliver(self) -> None:
        """Move rows from the spool to the database until stopped. Runs in the second thread."""
        backoff = Backoff(*_PAUSES)
        self._attempt(lambda: self._write([]))  # creates the table
        while not self._collected.is_set() or self._spool.rows or self.samples.due(time.time()):
            if self._attempt(self._step):
                backoff.reset()
            elif self._collected.is_set():
                return  # the rows stay in the spool for the next start
            else:
                self._collected.wait(backoff.next_pause())

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Run the work and return whether it succeeded."""
        try:
            work()
            self._tried = True
        except DatabaseUnavailableError as error:
            self.unavailable, self._tried = str(error), True
            self._log_limited("database", f"the ledger's database accepts no rows; usage is stored in {self.folder}: {error}")
            return False
        except OSError as error:
            self._log_limited("spool", f"the ledger's spool cannot be read at the moment; usage is stored in {self.folder}: {error}")
            return False
        except Exception:  # noqa: BLE001  the outer edge: this thread must not end
            _log.exception("the ledger could not write rows; it retries")
            return False
        return True

    def _step(self) -> None:
        """Write the oldest rows. Without rows: write engine samples, prune old rows, probe the database, or wait.

        A sample is written after the rows of the requests before it, so that a reconciliation finds them. Raises
        DatabaseUnavailableError and OSError.
        """
        now, gathering = time.time(), self._is_gathering()
        segment = None if gathering else self._spool.oldest()
        if segment is not None:
            self._deliver_segment(segment)
        if not (gathering or self._spool.has_closed):
            self._delivered_until = now
        if segment is not None:
            return
        if samples := self.samples.due(now if self._collected.is_set() else self._delivered_until - _SAMPLE_DELAY):
            self._store.write_samples([self.samples.values(sample) for sample in samples])
            self.samples.release(samples)
        elif self._retention is not None and time.monotonic() >= self._prune_at:
            more = self._store.prune(datetime.fromtimestamp(max(time.time() - self._retention, 0.0), UTC))
            self._prune_at = time.monotonic() + (0 if more else _PRUNE_EVERY)
        elif self.unavailable is not None:
            self._write([])  # probe the database, since there are no rows to write
        else:
            left = self._gather_until - time.monotonic()
            self._new_rows.wait(left if 0 < left < _IDLE_WAIT else _IDLE_WAIT)
            self._new_rows.clear()

    def _is_gathering(self) -> bool:
        """Check whether rows wait in the spool for more rows, because a large transaction is cheaper for each row.

        They wait until they fill a file of the spool, for some seconds at most.
        """
        return not (self._spool.has_closed or self._collected.is_set()) and time.monotonic() < self._gather_until

    def _deliver_segment(self, segment: Segment) -> None:
        if (payloads := self._spool.payloads(segment)) is None:
            return
        self._write(payloads)
        self._spool.remove(segment, len(payloads))
        self.earlier_deliveries += segment.inherited
        if len(payloads) >= _BUSY:
            self._gather_until = time.monotonic() + self._store.gather

    def _write(self, payloads: Sequence[bytes]) -> None:
        rows = [row for payload in payloads if (row := self._decoded(payload)) is not None]
        unfit = self._store.write(rows)
        with self._counting:
            self._unfit += unfit
            self.written += len(rows) - unfit
        if self.unavailable is not None:
            self._log_recovery("database", "the ledger's database is available again")
            self.unavailable = None

    def _decoded(self, payload: bytes) -> UsageRow | None:
        try:
            return decode(payload)
        except msgspec.DecodeError as error:
            _log.error("the ledger's spool contains an invalid row: %s", error)
            with self._counting:
                self._unfit += 1
            return None

    def _log_recovery(self, what: str, message: str) -> None:
        """Log that a problem is solved; the next problem of its kind is logged immediately."""
        self._next_log.pop(what, None)
        _log.warning("%s", message)

    def _log_limited(self, what: str, message: str) -> None:
        """Log a problem at most once a minute."""
        now = time.monotonic()
        if now >= self._next_log.get(what, now):
            self._next_log[what] = now + _LOG_EVERY
            _log.error("%s", message)


@contextmanager
def running(settings: conf.Ledger, beside: Path, opened: AbstractContextManager[Spool], workers: int) -> Iterator[Ledger]:
    """Run a ledger with a journal for each worker; at the end of the ``with``, their rows are on disk.

    ``beside`` is the folder of the configuration, ``opened`` the spool. Raises SpoolLockedError if another gateway uses the spool, and
    OSError if the spool cannot be used.
    """
    url = database_url(settings.url.get_secret_value(), beside)
    with opened as spooled, ExitStack() as stack:
        store = stack.enter_context(closing(UsageStore(url)))
        journals = [stack.enter_context(closing(Journal.create(f"journal-{number}"))) for number in range(workers)]
        ledger = Ledger(journals, spooled, store, settings.retention, PendingSamples(settings.sample_interval))
        threads = [threading.Thread(target=work, name=f"ledger-{work.__name__}", daemon=True) for work in (ledger.collect, ledger.deliver)]
        for thread in threads:
            thread.start()
        try:
            yield ledger
        finally:
            ledger.stop()
            for thread in threads:
                thread.join(_STOP_TIMEOUT)
            ledger.write_out(sys.stderr)
