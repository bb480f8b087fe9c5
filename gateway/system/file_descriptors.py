"""The file descriptors of this process. Each connection needs one, and the usual soft limit of 1,024 is low."""

from __future__ import annotations

import os
import resource


def raise_limit(maximum: int | None = None) -> None:
    """Raise the soft limit to the hard limit, or to ``maximum`` if that is lower. A higher limit is never lowered.

    Child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if maximum is None or (hard != resource.RLIM_INFINITY and hard < maximum) else maximum
    if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or soft < wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_missing_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, for this process and its children.

    Otherwise the next opened file, perhaps a client's connection, would get its number and receive its output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
