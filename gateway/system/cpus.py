"""Count the CPUs that this process can use.

The rule: the count is never more than the machine lets the process use, or processes would wait for each other. Affinity is set by
``taskset``, systemd's ``CPUAffinity`` and cpusets. Quotas are set by container limits and systemd's ``CPUQuota``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the number of CPUs in this process's affinity, or of its CPU quota if that is less; at least 1.

    A quota of 2.5 CPUs counts as 2: a third process would use up the quota of the others. ``groups`` is the mount point of cgroups,
    version 1 or 2.
    """
    quota = min(_quotas(groups, membership), default=math.inf)
    return int(max(1, min(len(os.sched_getaffinity(0)), quota)))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """Yield the quota of this process's group, and those of the groups that contain it."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, name = line.split(":", 2)
        path = Path(name.removeprefix("/"))
        if ".." in path.parts:  # a group outside of this process's namespace
            path = Path()
        for each in (path, *path.parents):
            if controllers == "":  # version 2
                yield from _quota(groups / each / "cpu.max")
            elif "cpu" in controllers.split(","):
                folder = groups / "cpu" / each
                yield from _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")


def _quota(*files: Path) -> Iterator[float]:
    """Yield the quota in a group's files; nothing if the group has none or cannot be read."""
    try:
        yield quota(" ".join(file.read_text() for file in files))
    except (OSError, ValueError):
        return


def quota(text: str) -> float:
    """Return the number of CPUs for a quota and its period, in microseconds. ``max`` and -1 allow all. Raises ValueError if malformed."""
    most, period = text.split()
    return math.inf if most in ("max", "-1") else int(most) / int(period)
