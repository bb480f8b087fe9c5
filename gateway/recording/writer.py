"""Store records in a thread: redact, encrypt, write; and delete the expired ones.

The rules: the event loop only adds to a queue, whose bytes ``recorder`` bounds. While the store fails, records are dropped and counted, and
it is tried again after a pause. The log has one line when storing fails, and one when it works again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

from gateway.recording.capture import Capture
from gateway.recording.document import document
from gateway.recording.encryption import Encryption
from gateway.recording.names import ENCRYPTED, PLAIN, file_name, is_expired
from gateway.recording.redaction import NotParsedError, Redactor
from gateway.recording.stores import StoreError, open_store
from gateway.snapshot.snapshot import Recording
from upstream.backoff import Backoff

DELETE_EVERY = 600.0
"""Seconds between two searches for expired records."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_CLOSE_TIMEOUT = 5.0
_log = logging.getLogger("vllm_gateway.worker")

Settled = Callable[[Capture, str], None]
"""Called in the event loop with a capture and its result."""


class Writer:
    """The thread that stores the records of one worker by one version of the settings."""

    def __init__(self, settings: Recording, *, deletes: bool) -> None:
        self._redactor = Redactor(settings.redact)
        self._encryption = Encryption(settings.encryption_keys) if settings.encryption_keys else None
        self._retention = settings.retention
        self._deletes = deletes
        self._store = open_store(settings)
        self._added: SimpleQueue[Capture | None] = SimpleQueue()
        self._done: deque[tuple[Capture, str]] = deque()
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._failing = False
        self._retry_at = 0.0
        self._thread = Thread(target=self._run, name="records", daemon=True)  # a store that hangs must not delay the exit
        self._thread.start()

    # In the event loop

    def add(self, capture: Capture) -> None:
        """Store a complete capture."""
        self._added.put(capture)

    def collect(self, settled: Settled) -> None:
        """Report what was stored or dropped since the last call."""
        while self._done:
            settled(*self._done.popleft())

    def close(self) -> None:
        """Stop after the captures that were added."""
        self._added.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, for a few seconds. Captures that are not stored by then are lost."""
        self._thread.join(_CLOSE_TIMEOUT)

    @property
    def is_running(self) -> bool:
        """Whether the thread may still store a capture."""
        return self._thread.is_alive()

    # In the thread

    def _run(self) -> None:
        due = monotonic()
        while True:
            if self._deletes and monotonic() >= due:
                self._delete_expired()
                due = monotonic() + DELETE_EVERY
            try:
                capture = self._added.get(timeout=DELETE_EVERY if self._deletes else None)
            except Empty:
                continue
            if capture is None:
                return
            self._done.append((capture, self._write(capture)))

    def _write(self, capture: Capture) -> str:
        """Store a capture, and return the result. Frees its bytes."""
        record = capture.record
        assert record is not None, "only complete captures are added"
        try:
            if monotonic() < self._retry_at:
                return "store_failed"
            data = document(capture, record, self._redactor)
            if self._encryption is not None:
                data = self._encryption.encrypt(record.id, data)
            self._store.put(file_name(record.id, PLAIN if self._encryption is None else ENCRYPTED), data)
        except NotParsedError:
            return "not_parsed"
        except StoreError as error:
            self._note_failure(error)
            return "store_failed"
        except Exception:  # noqa: BLE001  the outer edge: a bug with one record must not end the thread
            _log.exception("request %s was not recorded", record.id)
            return "failed"
        finally:
            capture.received, capture.sent = b"", None
            capture.pieces.clear()
        self._note_success()
        return "stored"

    def _note_failure(self, error: StoreError) -> None:
        self._retry_at = monotonic() + self._backoff.next_pause()
        if not self._failing:
            self._failing = True
            _log.warning("requests are not recorded: %s; requests are served, and the store is tried again", error)

    def _note_success(self) -> None:
        if self._failing:
            self._failing = False
            self._backoff.reset()
            _log.info("requests are recorded again")

    def _delete_expired(self) -> None:
        now = datetime.now(UTC)
        try:
            for day in list(self._store.days()):
                if is_expired(day, now, self._retention):
                    self._store.delete(day)
        except StoreError as error:
            _log.warning("expired records were not deleted: %s; they are tried again", error)
