"""What a proxy costs, by the operating system's own accounting of its whole process tree.

The rule: a cost is the difference of two readings of one tree. A child that ended in between still counts, because its parent's
`cutime` and `cstime` hold it (proc(5)).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

PROXY_CORE = 0
LOAD_CORE = 1


class TooFewCores(Exception):
    """Proxy and load cannot be kept apart on this machine."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A process and all its descendants; of None, nothing, which costs nothing."""

    pid: int | None

    def processes(self) -> list[psutil.Process]:
        """Those that are alive, the root first."""
        if self.pid is None:
            return []
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]

    def cpu(self) -> float:
        """User and system time, in seconds, of the living and of the children that they have waited for."""
        return sum(_cpu(each) for each in self.processes())

    def rss(self) -> int:
        """Resident memory in bytes; what processes share is counted in each."""
        return sum(_rss(each) for each in self.processes())


def _cpu(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def connections(process: psutil.Process, port: int) -> int:
    """How many clients of a port of its own a process is connected with."""
    found = process.net_connections("tcp4")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


@dataclass(slots=True)
class Cost:
    """CPU seconds of a `with` block: the proxy's tree, and this process, which may be generating the load."""

    proxy: float = field(default=0.0)
    own: float = field(default=0.0)


@contextmanager
def cost(tree: Tree) -> Iterator[Cost]:
    """Fill in a `Cost` when the block ends."""
    spent = Cost()
    before, own = tree.cpu(), _cpu(psutil.Process())
    yield spent
    spent.proxy = tree.cpu() - before
    spent.own = _cpu(psutil.Process()) - own


@contextmanager
def pinned_to(core: int) -> Iterator[None]:
    """Keep this process, and what it starts, on one core.

    Raises:
        TooFewCores: the core is not there, or not ours to use.
    """
    before = os.sched_getaffinity(0)
    if not {PROXY_CORE, core} <= before:
        raise TooFewCores(f"cores {PROXY_CORE} and {core} are needed; there are {sorted(before)}")
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
