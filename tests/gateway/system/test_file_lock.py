"""A lock on a range of a file excludes other processes from the range, and from nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.system.file_lock import FileLock

TAKE = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))"


def is_free(fd: int, byte: int) -> bool:
    """Return whether another process could lock a byte."""
    command = [sys.executable, "-c", TAKE, str(fd), str(byte)]
    return subprocess.run(command, pass_fds=[fd], stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(("length", "start", "free"), [(0, 0, []), (1, 7, [6, 8]), (1, 2**55, [7])])
def test_other_processes_are_excluded_from_the_range(tmp_path: Path, length: int, start: int, free: list[int]) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        with FileLock(fd, length, start):
            assert not is_free(fd, start) and all(is_free(fd, byte) for byte in free)
        assert is_free(fd, start)
    finally:
        os.close(fd)
