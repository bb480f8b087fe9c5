"""The file to which lines are appended, and beside it the head of the chain, so that the chain goes on after a restart.

The rules: a line is synced before ``append`` returns, or it is not in the file. A line without its line break was not acknowledged: it is
removed at the next start. The head is written after each line, so it is at most one line behind. If the file ends before the head, lines
were removed: the chain goes on from the head, and the gap shows for ever.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from gateway.audit.chain import START, Head, is_next, next_line, read_line, signed_heads
from gateway.audit.entry import AuditUnavailableError, Entry

_MODE = 0o600
_TAIL = 4096  # bytes that are read at first to find the last lines
_log = logging.getLogger("vllm_gateway.audit")


class JournalLockedError(Exception):
    """Another process writes the file."""


class Journal:
    """Appends lines to ``file``. ``head_file`` has the signed head. ``limit`` is the most bytes that the file may have, None without one.

    Raises OSError.
    """

    def __init__(self, file: Path, head_file: Path, key: bytes, limit: int | None = None) -> None:
        self._file = file
        self._head_file = head_file
        self._key = key
        self._limit = limit
        self._fd = _opened(file)
        self.size = _without_torn_end(self._fd, file)
        self.head = self._last_head()

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
        data, head = next_line(self.head, entry, time, self._key)
        try:
            self._reopen_if_replaced()
            _write_at_end(self._fd, data + b"\n", self.size)
            try:
                _replace(self._head_file, head.signed(self._key))
            except OSError:
                os.ftruncate(self._fd, self.size)
                raise
        except OSError as error:
            raise AuditUnavailableError(f"{error.filename or self._file}: {error.strerror}") from error
        self.size += len(data) + 1
        self.head = head
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
        """Open the file again if it was moved or removed, so that no line is written where nobody reads it."""
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

    def _last_head(self) -> Head:
        """Return the head from which the chain goes on."""
        known, lines = self._known_head(), _last_lines(self._fd, self.size)
        last = read_line(lines[-1]) if lines else None
        if known is None:
            return self._head_without_known(lines)
        if last is None or last.chain != known.chain:
            if last is not None or (self._limit is None and known.seq):
                _log.error("%s does not end with entry %d of its chain, as its head does: entries were removed", self._file, known.seq)
            return known
        if last.seq == known.seq + 1 and is_next(lines[-1], known.mac, self._key):
            return Head(last.chain, last.seq, last.mac)  # the process was killed between the line and its head
        if (last.seq, last.mac) != (known.seq, known.mac):
            _log.error("%s ends with entry %d, but its head names entry %d: entries were changed", self._file, last.seq, known.seq)
        return known

    def _known_head(self) -> Head | None:
        with suppress(FileNotFoundError):
            text = self._head_file.read_text("ascii", "replace")
            found = signed_heads(text, self._key)
            if found:
                return found[-1]
            _log.warning("%s is not signed with this secret: a new chain begins", self._head_file)
        return None

    def _head_without_known(self, lines: list[bytes]) -> Head:
        """Return the head of the last line if it has this key, otherwise that of a new chain."""
        last = read_line(lines[-1]) if lines else None
        before = read_line(lines[-2]) if len(lines) > 1 else None
        if last is not None and not self._head_file.exists():
            mac = before.mac if before is not None and (before.chain, before.seq) == (last.chain, last.seq - 1) else START
            if is_next(lines[-1], mac, self._key):
                _log.warning("%s has no head in %s: the chain goes on from its last entry", self._file, self._head_file)
                return Head(last.chain, last.seq, last.mac)
        return Head(token_hex(16), 0, START)


@contextmanager
def journal(file: Path, folder: Path, key: bytes, limit: int | None = None) -> Iterator[Journal]:
    """Open a journal whose head is in ``folder``, which is created. Raises JournalLockedError and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalLockedError(f"another gateway writes {file}") from error
        opened = Journal(file, head_file(folder), key, limit)
        try:
            yield opened
        finally:
            opened.close()
    finally:
        os.close(fd)


def head_file(folder: Path) -> Path:
    """Return the file of the head in a journal's folder."""
    return folder / "head"


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
        if start == 0:
            return lines[-2:]
        if len(lines) > 2:  # the first one may be incomplete
            return lines[-2:]
        length *= 4


def _write_at_end(fd: int, data: bytes, size: int) -> None:
    """Write data behind ``size`` bytes, and sync it. Raises OSError, and then the file has its former size."""
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


def _replace(file: Path, text: str) -> None:
    """Replace a small file at once, and sync it. Raises OSError."""
    fresh = file.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
    try:
        os.write(fd, text.encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.replace(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
