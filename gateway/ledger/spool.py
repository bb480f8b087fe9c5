"""Keep rows on disk, between the workers' journals and the database, so that an outage of the database loses none.

Every row passes through here. A batch is a file or a part of one, and is synced before the journals release it. Files are read in
their order once they are closed, and deleted when the database has their rows. The rules: one process at a time uses the folder.
The folder has a size limit; beyond it, the oldest rows are dropped and counted. An unreadable file blocks no other: it is set
aside, and its rows count as dropped.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.ledger.errors import SpoolLockedError
from gateway.ledger.row import frame, frames

LIMIT = 256 * 1024 * 1024
"""Bytes that the spool may use: about a million rows."""

_SEGMENT = 4 * 1024 * 1024
_SUFFIX, _SAVED, _UNREADABLE = ".rows", "saved-", ".unreadable"
_MAX_UNREADABLE = 8  # unreadable files that are retained for recovery
_PROBE, _PROBE_SIZE = "probe", 64 * 1024  # a file, and as many bytes as some hundred rows have
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # limits of the process: the file itself may be readable later
_log = logging.getLogger("vllm_gateway.ledger")


@dataclass(frozen=True, slots=True)
class Segment:
    """A closed file of rows. ``inherited``: an earlier gateway or its workers wrote it."""

    path: Path
    rows: int
    size: int
    inherited: bool = False


class Spool:
    """The folder. One thread appends, another thread removes. ``rows`` and ``size`` (bytes) are what is stored; ``dropped`` are rows.

    ``inherited`` is the number of files that an earlier gateway left.
    """

    def __init__(self, folder: Path, limit: int = LIMIT, segment: int = _SEGMENT) -> None:
        self.folder = folder
        self._identity = _identity(folder)
        self._limit = limit
        self._segment = segment
        self._lock = threading.Lock()
        self._closed: deque[Segment] = deque()
        self._open: Segment | None = None
        self._in_use: Segment | None = None
        self._number = 0
        self.rows, self.size, self.dropped, self.inherited = 0, 0, 0, 0
        self._adopt(waiting_files(folder))

    def take_over(self, other: Path) -> int:
        """Move the rows of another folder, which the caller has locked, to this one. Returns their number. Raises OSError."""
        with self._lock:
            before = self.rows
            for path in waiting_files(other):
                path.rename(moved := self.folder / path.name)
                self._adopt([moved])
            sync_folder(self.folder)
            sync_folder(other)
            return self.rows - before

    def append(self, data: bytes, rows: int) -> None:
        """Append frames and sync them. Raises OSError; nothing was stored then."""
        with self._lock:
            before = self._open or Segment(self._next(), 0, 0)
            try:
                write_synced(before.path, data, before.size)
            except FileNotFoundError:
                self._close()  # the file was removed: the next rows get a new one
                raise
            except OSError:
                if not before.size:  # delete the partial file, or each attempt would leave one
                    with suppress(OSError):
                        before.path.unlink()
                raise
            self._open = Segment(before.path, before.rows + rows, before.size + len(data))
            if self._open.size >= self._segment:
                self._close()
            self._keep_to_the_limit()
            self._update_counts()

    def probe(self) -> None:
        """Write a file and remove it, to check whether rows can be written again. Raises OSError."""
        path = self.folder / _PROBE
        try:
            write_synced(path, bytes(_PROBE_SIZE))
        finally:
            with suppress(OSError):
                path.unlink()

    @property
    def has_closed(self) -> bool:
        """Whether a file gets no more rows, so that waiting does not make its delivery larger."""
        return bool(self._closed)

    def oldest(self) -> Segment | None:
        """Return the oldest rows; None if the spool is empty. The same segment is returned until it is removed."""
        with self._lock:
            if not self._closed:
                self._close()
            if not self._closed:
                self._adopt(sorted(self.folder.glob(_SAVED + "*" + _SUFFIX)))
            self._in_use = self._closed[0] if self._closed else None
            return self._in_use

    def remove(self, segment: Segment, found: int) -> None:
        """Delete a segment whose rows are in the database; ``found`` of them could be read."""
        with self._lock:
            self._drop_segment(segment)
            segment.path.unlink(missing_ok=True)
            if found < segment.rows:
                self.dropped += segment.rows - found
                _log.error("the ledger's spool had %d rows; %d of them could be read", segment.rows, found)

    def payloads(self, segment: Segment) -> list[bytes] | None:
        """Read the rows of a segment. None: its file is unreadable and was quarantined. Raises OSError for a temporary error."""
        try:
            return list(frames(segment.path.read_bytes()))
        except OSError as error:
            self._raise_if_it_may_pass(error)
            with self._lock:
                self._drop_segment(segment)
                self.dropped += segment.rows
                self._quarantine(segment.path, segment.rows, error)
            return None

    def _drop_segment(self, segment: Segment) -> None:
        if segment in self._closed:
            self._closed.remove(segment)
        self._in_use = None
        self._update_counts()

    def _adopt(self, found: Sequence[Path]) -> None:
        """Take over what an earlier gateway left, and what its workers saved when it died. A torn end is not counted as rows."""
        for path in found:
            try:
                data = path.read_bytes()
            except OSError as error:
                self._raise_if_it_may_pass(error)
                self._quarantine(path, 0, error)  # the number of its rows is unknown
            else:
                self._closed.append(Segment(path, sum(1 for _ in frames(data)), len(data), inherited=True))
        self._update_counts()

    def _raise_if_it_may_pass(self, error: OSError) -> None:
        """Raise the error if it may be temporary: a limit of this process, or a folder that was replaced or is missing."""
        if error.errno in _OWN_LIMITS or _identity(self.folder) != self._identity:
            raise error

    def _quarantine(self, path: Path, rows: int, error: OSError) -> None:
        _log.error("a file of the ledger's spool cannot be read and is quarantined, with %s rows: %s", rows or "its", error)
        with suppress(OSError):
            path.rename(path.with_suffix(_UNREADABLE))
        for older in sorted(self.folder.glob("*" + _UNREADABLE))[:-_MAX_UNREADABLE]:
            with suppress(OSError):
                older.unlink()

    def _all(self) -> list[Segment]:
        return [*self._closed, *([self._open] if self._open is not None else ())]

    def _update_counts(self) -> None:
        """Update the public counts, which are read without the lock so that readers do not wait for a disk."""
        self.rows, self.size = sum(each.rows for each in self._all()), sum(each.size for each in self._all())
        self.inherited = sum(each.inherited for each in self._closed)

    def _close(self) -> None:
        if self._open is not None:
            self._closed.append(self._open)
        self._open = None

    def _keep_to_the_limit(self) -> None:
        while sum(segment.size for segment in self._all()) > self._limit:
            oldest = next((segment for segment in self._closed if segment is not self._in_use), None)
            if oldest is None:
                return
            self._closed.remove(oldest)
            oldest.path.unlink(missing_ok=True)
            self.dropped += oldest.rows

    def _next(self) -> Path:
        """Return a file name that sorts after all others, also after the files of earlier processes."""
        self._number += 1
        return self.folder / f"{time.time_ns():020}-{self._number:06}{_SUFFIX}"


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def write_synced(path: Path, data: bytes, at: int = 0) -> None:
    """Write data at an offset of a file, truncate the rest, and sync. Raises OSError."""
    with _opened(path, os.O_WRONLY | (0 if at else os.O_CREAT)) as fd:
        os.ftruncate(fd, at)
        os.lseek(fd, at, os.SEEK_SET)
        _write(fd, data)
    if not at:
        sync_folder(path.parent)


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a small file at once, and sync it. Raises OSError."""
    fresh = path.with_suffix(".new")
    with _opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        _write(fd, data)
    fresh.replace(path)
    sync_folder(path.parent)


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file or a folder in the block. A new file is for this user only. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files. Raises OSError."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def save(folder: Path, data: bytes, payloads: Sequence[bytes]) -> None:
    """Save frames, and rows after them, for the next gateway. Raises OSError."""
    content = data + b"".join(map(frame, payloads))
    if not content:
        return
    name = f"{_SAVED}{time.time_ns():020}-{os.getpid()}"
    write_synced(folder / name, content)
    (folder / name).rename(folder / (name + _SUFFIX))
    sync_folder(folder)


def waiting_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, the oldest first."""
    return sorted(folder.glob("*" + _SUFFIX))


@contextmanager
def spool(folder: Path) -> Iterator[Spool]:
    """Yield the spool in a folder, which is created. Raises SpoolLockedError and OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder):
        yield Spool(folder)


@contextmanager
def locked(folder: Path, problem: Exception | None = None) -> Iterator[None]:
    """Lock a folder during the block. Raises ``problem``, by default SpoolLockedError, if another process has it, and OSError."""
    with _opened(folder / "lock", os.O_RDWR | os.O_CREAT) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise problem or SpoolLockedError(f"another gateway uses {folder}") from error
        yield
