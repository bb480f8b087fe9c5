"""Exclude other processes: a POSIX lock on a range of a file.

The rule: the kernel releases the lock when its process dies, or when the process closes the file. A process does not exclude itself.
"""

from __future__ import annotations

import fcntl


class FileLock:
    """A lock on ``length`` bytes from ``start`` on, which need not exist; 0: on all of them. It is held in a ``with``."""

    def __init__(self, fd: int, length: int = 0, start: int = 0) -> None:
        self._fd = fd
        self._length = length
        self._start = start

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX, self._length, self._start)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, self._length, self._start)
