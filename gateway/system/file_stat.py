"""How a file looks from outside, its links followed: whoever waits for a change compares two looks, and reads no content."""

from __future__ import annotations

import os

Look = tuple[int, ...] | None
"""None: it is not there."""


def look(file: str | os.PathLike[str]) -> Look:
    """Another identity, size or time is another content, also where a link leads elsewhere, as in what Kubernetes mounts."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
