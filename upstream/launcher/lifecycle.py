"""The states of a launched server, the values that describe it, and how long to pause before it is started again.

Pure. The rule: a state follows another only where ``TRANSITIONS`` says so.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from upstream.http.address import Address
from upstream.vllm.command_line import LaunchSettings
from upstream.vllm.failures import Cause, ProcessExit


class LaunchState(StrEnum):
    """Where a launched server is in its life."""

    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    FAILED = "failed"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    STOPPED = "stopped"


TRANSITIONS: dict[LaunchState, frozenset[LaunchState]] = {
    # Its process is being started and does not answer /health yet.
    LaunchState.STARTING: frozenset({LaunchState.READY, LaunchState.FAILED, LaunchState.STOPPING}),
    # /health has answered 200 once; from here on the prober says whether it is well.
    LaunchState.READY: frozenset({LaunchState.CRASHED, LaunchState.FAILED, LaunchState.STOPPING}),
    # A ready one's process has died or is renewed: what is left of it is being ended.
    LaunchState.CRASHED: frozenset({LaunchState.BACKING_OFF, LaunchState.STOPPING}),
    # A starting one's process died or was too slow, or a ready one's died once too often. If it was given up, it stays here
    # until it is allowed another time for its start.
    LaunchState.FAILED: frozenset({LaunchState.BACKING_OFF, LaunchState.STOPPING}),
    # Nothing of it is left; after a pause it is started again.
    LaunchState.BACKING_OFF: frozenset({LaunchState.STARTING, LaunchState.STOPPING}),
    # It was asked to end.
    LaunchState.STOPPING: frozenset({LaunchState.STOPPED}),
    LaunchState.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One replica to launch. ``name``: unique and for people, e.g. ``MODEL#0``. ``startup_timeout``: seconds until /health answers."""

    name: str
    settings: LaunchSettings
    startup_timeout: float


@dataclass(frozen=True, slots=True)
class LaunchStatus:
    """What is known of a launched server at a moment.

    ``since``: wall clock seconds at which it entered ``state``. ``pid``: its main process, None while there is none.
    ``address``: where that process listens, or last did; a restart may change it. ``restarts``: starts after the
    first one. ``first_start_finished``: the first start has ended, well or badly. ``given_up``: it has failed too often and is not
    started again. ``reason``: why it crashed or failed, in one line, until it is ready again; ``cause``: the same from the table of
    known causes, and ``tail``: the last lines of its log at that time. ``progress``: while it starts, the last line of its log that says
    something. All of them are for operators, never for clients.
    """

    name: str
    state: LaunchState
    since: float
    address: Address
    log: Path
    pid: int | None = None
    restarts: int = 0
    first_start_finished: bool = False
    given_up: bool = False
    reason: str = ""
    cause: Cause | None = None
    tail: str = ""
    progress: str = ""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses, in seconds, that double from ``first`` to ``cap``; a server that was ready for ``reset_after`` begins anew.

    After ``limit`` failures in a row it is given up.
    """

    first: float = 1.0
    cap: float = 60.0
    reset_after: float = 300.0
    limit: int = 10

    def count_failures(self, before: int, ready_for: float) -> int:
        """The failures in a row, with the one that ended ``ready_for`` seconds of readiness."""
        return 1 if ready_for >= self.reset_after else before + 1

    def pause(self, failures: int) -> float:
        """The pause after so many failures in a row (1 or more)."""
        # The exponent is bounded: a server may fail for years.
        return min(self.cap, self.first * 2.0 ** min(failures - 1, 32))


SHIM_LOST = "its keeper was killed"


def describe_exit(status: int | None, memory_kills: int | None) -> ProcessExit:
    """How a process ended, of a status as ``subprocess`` has it; None: its keeper was killed.

    ``memory_kills``: how many processes the kernel has killed for lack of memory meanwhile; None where that can't be known.
    """
    return ProcessExit(_words(status, memory_kills), status, memory_kills)


def _words(status: int | None, memory_kills: int | None) -> str:
    if status == -signal.SIGKILL and memory_kills:
        return "killed by the kernel for lack of memory (SIGKILL)"
    if status == -signal.SIGKILL and memory_kills is None:
        return "killed by SIGKILL, perhaps by the kernel for lack of memory"
    return _plainly(status) + (", and the kernel has killed a process for lack of memory meanwhile" if memory_kills else "")


def _plainly(status: int | None) -> str:
    if status is None:
        return SHIM_LOST
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
