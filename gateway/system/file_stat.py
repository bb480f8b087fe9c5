"""The state of a file without its content, for detecting changes by comparison. Symbolic links are followed."""

from __future__ import annotations

import os

FileStat = tuple[int, ...] | None
"""None: the file does not exist."""


def file_stat(file: str | os.PathLike[str]) -> FileStat:
    """Return identity, size and times of a file. A link that leads elsewhere, as Kubernetes mounts use, changes the identity."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
