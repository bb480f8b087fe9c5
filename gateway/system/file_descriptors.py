"""Which descriptors a process has, and how many it may have. Each connection is one, and the usual soft limit of 1,024 is few."""

from __future__ import annotations

import os
import resource


def raise_limit(most: int | None = None) -> None:
    """Take as many as the hard limit allows, or ``most`` of them. What there is already is never lowered.

    Whatever this process starts takes the limit over.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if most is None or (hard != resource.RLIM_INFINITY and hard < most) else most
    if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or soft < wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def stand_in() -> None:
    """Put /dev/null where standard input, output or error is closed, for this process and those that it starts: what is opened next, a
    client's connection perhaps, would have its number, and be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
