"""The file to which lines are appended, and beside it the checkpoint of the chain, so that the chain continues after a restart.

The rules: a line is synced before ``append`` returns, or it is not in the file. A line without its line break was not acknowledged: it is
removed at the next start. The checkpoint is written after each line, so it is at most one line behind. If the file ends before the
checkpoint, lines were removed: the chain continues from the checkpoint, and the gap stays visible.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from gateway.audit.chain import START, Checkpoint, is_next, next_line, read_line, signed_checkpoints
from gateway.audit.entry import AuditUnavailableError, Entry
from gateway.ledger.spool import locked, replace_synced

_MODE = 0o600
_TAIL = 4096  # bytes that are read at first to find the last lines
_log = logging.getLogger("vllm_gateway.audit")


class JournalLockedError(Exception):
    """Another process writes the file."""


class Journal:
    """Appends lines to ``file``. ``checkpoint_file`` has the signed checkpoint. ``limit`` is the most bytes that the file may have.

    Raises OSError.
    """

    def __init__(self, file: Path, checkpoint_file: Path, key: bytes, limit: int | None = None) -> None:
        self._file = file
        self._checkpoint_file = checkpoint_file
        self._key = key
        self._limit = limit
        self._fd = _opened(file)
        self.size = _without_torn_end(self._fd, file)
        self.checkpoint = self._last_checkpoint()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def check(self) -> None:
        """Raise AuditUnavailableError if there is no room for another line."""
        if self._limit is not None and self.size >= self._limit:
            raise AuditUnavailableError(f"{self.size} bytes wait for the database, as many as may")

    def append(self, entry: Entry, time: datetime) -> bytes:
        """Append the line of an entry, and sync it. Returns the line. Raises AuditUnavailableError, and then nothing was written."""
        self.check()
        data, checkpoint = next_line(self.checkpoint, entry, time, self._key)
        try:
            self._reopen_if_replaced()
            _write_at_end(self._fd, data + b"\n", self.size)
            try:
                replace_synced(self._checkpoint_file, checkpoint.signed(self._key).encode() + b"\n")
            except OSError:
                os.ftruncate(self._fd, self.size)
                raise
        except OSError as error:
            raise AuditUnavailableError(f"{error.filename or self._file}: {error.strerror}") from error
        self.size += len(data) + 1
        self.checkpoint = checkpoint
        return data

    def read(self, start: int) -> list[bytes]:
        """Return the lines from an offset on. Raises OSError."""
        return os.pread(self._fd, self.size - start, start).splitlines()

    def clear(self, size: int) -> bool:
        """Remove all lines if there are exactly ``size`` bytes of them. Raises OSError."""
        if size != self.size:
            return False
        os.ftruncate(self._fd, 0)
        os.fsync(self._fd)
        self.size = 0
        return True

    def _reopen_if_replaced(self) -> None:
        """Open the file again if it was moved or removed, so that no line is written to a file that is not read."""
        try:
            found, own = self._file.stat(), os.fstat(self._fd)
            if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino) and own.st_size == self.size:
                return
            _log.error("%s was changed by another program", self._file)
        except FileNotFoundError:
            _log.warning("%s was moved or removed: a new file continues the chain", self._file)
        fd = _opened(self._file)
        self.close()
        self._fd = fd
        self.size = _without_torn_end(fd, self._file)

    def _last_checkpoint(self) -> Checkpoint:
        """Return the checkpoint where the chain continues."""
        known, lines = self._known_checkpoint(), _last_lines(self._fd, self.size)
        last = read_line(lines[-1]) if lines else None
        if known is None:
            return self._checkpoint_without_known(lines)
        if last is None or last.chain != known.chain:
            if last is not None or (self._limit is None and known.seq):
                _log.error(
                    "%s does not end with entry %d of its chain, as its checkpoint does: entries were removed", self._file, known.seq
                )
            return known
        if last.seq == known.seq + 1 and is_next(lines[-1], known.mac, self._key):
            return Checkpoint(last.chain, last.seq, last.mac)  # the process was killed between the line and its checkpoint
        if (last.seq, last.mac) != (known.seq, known.mac):
            _log.error("%s ends with entry %d, but its checkpoint names entry %d: entries were changed", self._file, last.seq, known.seq)
        return known

    def _known_checkpoint(self) -> Checkpoint | None:
        with suppress(FileNotFoundError):
            found = signed_checkpoints(self._checkpoint_file.read_text("ascii", "replace"), self._key)
            if found:
                return found[-1]
            _log.warning("%s is not signed with this secret: a new chain begins", self._checkpoint_file)
        return None

    def _checkpoint_without_known(self, lines: list[bytes]) -> Checkpoint:
        """Return the checkpoint of the last line if it has this key, otherwise the checkpoint of a new chain."""
        last = read_line(lines[-1]) if lines else None
        before = read_line(lines[-2]) if len(lines) > 1 else None
        if last is not None and not self._checkpoint_file.exists():
            mac = before.mac if before is not None and (before.chain, before.seq) == (last.chain, last.seq - 1) else START
            if is_next(lines[-1], mac, self._key):
                _log.warning("%s has no checkpoint in %s: the chain continues from its last entry", self._file, self._checkpoint_file)
                return Checkpoint(last.chain, last.seq, last.mac)
        return Checkpoint(token_hex(16), 0, START)


@contextmanager
def journal(file: Path, folder: Path, key: bytes, limit: int | None = None) -> Iterator[Journal]:
    """Open a journal whose checkpoint is in ``folder``, which is created. Raises JournalLockedError and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refused = JournalLockedError(f"another gateway writes {file}")
    with locked(folder, refused), closing(Journal(file, checkpoint_file(folder), key, limit)) as opened:
        yield opened


def checkpoint_file(folder: Path) -> Path:
    """Return the file of the checkpoint in a journal's folder."""
    return folder / "checkpoint"


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)


def _without_torn_end(fd: int, file: Path) -> int:
    """Remove an incomplete line at the end, and return the size. Raises OSError."""
    size = os.fstat(fd).st_size
    block = size
    while size and os.pread(fd, 1, size - 1) != b"\n":
        block = max(size - _TAIL, 0)
        found = os.pread(fd, size - block, block).rfind(b"\n")
        size = block + found + 1 if found >= 0 else block
    if size < os.fstat(fd).st_size:
        _log.warning("%s ended with an incomplete entry, which was not acknowledged and is removed", file)
        os.ftruncate(fd, size)
        os.fsync(fd)
    return size


def _last_lines(fd: int, size: int) -> list[bytes]:
    """Return the last two lines, or those that exist."""
    length = _TAIL
    while True:
        start = max(size - length, 0)
        lines = os.pread(fd, size - start, start).splitlines()
        if start == 0 or len(lines) > 2:  # the first one of three may be incomplete
            return lines[-2:]
        length *= 4


def _write_at_end(fd: int, data: bytes, size: int) -> None:
    """Write data after ``size`` bytes, and sync it. Raises OSError, and then the file has its former size."""
    try:
        left, at = memoryview(data), size
        while left:
            written = os.pwrite(fd, left, at)
            left, at = left[written:], at + written
        os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise
