"""Counts the processes that the kernel has killed for lack of memory, as far as it reports them.

Owns the files with that number. The rule: an unknown number is reported as None, never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from upstream.launcher.shim import read

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def kills(root: Path = Path("/")) -> int | None:
    """Return the number of out-of-memory kills so far, in this process's control group or on the whole machine.

    Launched servers share the control group. ``root``: the folder with ``proc`` and ``sys``. Sources: cgroup v2's memory.events, v1's
    memory.oom_control (Linux's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst), /proc/vmstat. All of them count since Linux 4.13.
    """
    return next((int(found[1]) for path in _paths(root) if (found := _COUNT.search(read(str(path)).decode()))), None)


def _paths(root: Path) -> Iterator[Path]:
    # The root of a hierarchy has no count. The machine's count is used then.
    for row in read(str(root / "proc/self/cgroup")).decode().splitlines():
        _, controllers, group = row.split(":", 2)
        if controllers == "":
            yield root / "sys/fs/cgroup" / group.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory" / group.lstrip("/") / "memory.oom_control"
    yield root / "proc/vmstat"
