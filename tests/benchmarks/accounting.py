"""The cost of a proxy, by the operating system's accounting of its whole process tree.

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

    def first(self) -> float:
        """The first process alone."""
        return sum(_cpu(each, with_children=False) for each in self.processes()[:1])

    def workers(self) -> list[psutil.Process]:
        """The gateway's workers; no other proxy has any."""
        return [each for each in self.processes() if "worker" in each.cmdline()]

    def rss(self) -> int:
        """Resident memory in bytes; what processes share is counted in each."""
        return sum(_rss(each) for each in self.processes())


def _cpu(process: psutil.Process, *, with_children: bool = True) -> float:
    try:
        return sum(process.cpu_times()[: 4 if with_children else 2])
    except psutil.NoSuchProcess:
        return 0.0


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def connections(process: psutil.Process, port: int) -> int:
    """Count the clients that are connected to a port of a process."""
    found = process.net_connections("tcp4")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


@dataclass(slots=True)
class Cost:
    """CPU seconds of a `with` block: the proxy's tree, the first process of that alone, and this process, which may be generating the
    load."""

    proxy: float = field(default=0.0)
    first: float = field(default=0.0)
    own: float = field(default=0.0)


@contextmanager
def cost(tree: Tree) -> Iterator[Cost]:
    """Fill in a `Cost` when the block ends."""
    spent = Cost()
    before, first, own = tree.cpu(), tree.first(), _cpu(psutil.Process())
    yield spent
    spent.proxy = tree.cpu() - before
    spent.first = tree.first() - first
    spent.own = _cpu(psutil.Process()) - own


@dataclass(slots=True)
class Neighbors:
    """`share`: how much of the machine, from 0 to 1, was taken by what is not ours, in a `with` block."""

    share: float = field(default=0.0)


@contextmanager
def neighbors() -> Iterator[Neighbors]:
    """Fill in a `Neighbors` when the block ends, by which time the processes that it started must have ended."""
    found, tree = Neighbors(), Tree(os.getpid())
    before, own = psutil.cpu_times(), tree.cpu()
    yield found
    after = psutil.cpu_times()
    idle = after.idle + after.iowait - before.idle - before.iowait
    found.share = share_of_others(sum(after) - sum(before), idle, tree.cpu() - own)


def share_of_others(whole: float, idle: float, own: float) -> float:
    """Of `whole` seconds of CPU time, what was neither idle nor our own, as a share from 0 to 1."""
    return max(0.0, 1 - (idle + own) / whole) if whole else 0.0


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
