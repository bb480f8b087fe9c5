"""The states of a launched server, the values that describe it, and the pause before its restart.

Pure. The rule: only the transitions in ``TRANSITIONS`` happen.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from upstream.backoff import doubled
from upstream.http.address import Address
from upstream.vllm.command_line import LaunchSettings
from upstream.vllm.failures import Cause, ProcessExit


class LaunchState(StrEnum):
    """The state of a launched server."""

    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    FAILED = "failed"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    STOPPED = "stopped"


TRANSITIONS: dict[LaunchState, frozenset[LaunchState]] = {
    # The process has started and does not respond to /health yet.
    LaunchState.STARTING: frozenset({LaunchState.READY, LaunchState.FAILED, LaunchState.STOPPING}),
    # /health has returned 200 once. From here on the prober decides whether the server works.
    LaunchState.READY: frozenset({LaunchState.CRASHED, LaunchState.FAILED, LaunchState.STOPPING}),
    # The process of a ready server has exited or is being restarted: its remaining processes are being killed.
    LaunchState.CRASHED: frozenset({LaunchState.BACKING_OFF, LaunchState.STOPPING}),
    # The process of a starting server exited or was too slow, or a ready server failed too often. A server that was given up stays here
    # until its startup timeout changes.
    LaunchState.FAILED: frozenset({LaunchState.BACKING_OFF, LaunchState.STOPPING}),
    # No process is left. The server starts again after a pause.
    LaunchState.BACKING_OFF: frozenset({LaunchState.STARTING, LaunchState.STOPPING}),
    # A stop was requested.
    LaunchState.STOPPING: frozenset({LaunchState.STOPPED}),
    LaunchState.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One replica to launch. ``name``: unique, e.g. ``MODEL#0``. ``startup_timeout``: seconds until /health returns 200."""

    name: str
    settings: LaunchSettings
    startup_timeout: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A crash or a failed start. ``when``: wall clock seconds. ``cause``: its code. ``line``: the explanation in one line."""

    when: float
    cause: str
    line: str


@dataclass(frozen=True, slots=True)
class LaunchStatus:
    """The status of a launched server at one time. For operators, never for clients.

    ``since``: wall clock seconds at which it entered ``state``. ``pid``: its main process, or None. ``address``: the address of its current
    or last process; a restart may change it. ``restarts``: starts after the first one. ``first_start_finished``: the first start has
    succeeded or failed. ``given_up``: it has failed too often and is not started again. ``reason``: why it crashed or failed, in one line,
    until it is ready again. ``cause``: the same from the table of known causes. ``tail``: the last lines of its log at that time.
    ``progress``: while it starts, the last line of its log that shows progress. ``last_failure``: its last crash or failed start,
    also after it is ready again.
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
    last_failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses in seconds that double from ``first`` to ``cap``. A server that was ready for ``reset_after`` starts with ``first`` again.

    After ``limit`` failures in a row the server is given up.
    """

    first: float = 1.0
    cap: float = 60.0
    reset_after: float = 300.0
    limit: int = 10

    def count_failures(self, before: int, ready_for: float) -> int:
        """Return the number of consecutive failures, including a new failure after ``ready_for`` seconds of readiness."""
        return 1 if ready_for >= self.reset_after else before + 1

    def pause(self, failures: int) -> float:
        """Return the pause after this number of failures in a row (1 or more)."""
        return doubled(self.first, self.cap, failures)


SHIM_LOST = "its shim was killed"


def describe_exit(status: int | None, memory_kills: int | None) -> ProcessExit:
    """Return how a process ended. ``status``: as in ``subprocess``; None if its shim was killed.

    ``memory_kills``: the processes that the kernel has killed for lack of memory meanwhile; None if their number is unknown.
    """
    return ProcessExit(_exit_text(status, memory_kills), status, memory_kills)


def _exit_text(status: int | None, memory_kills: int | None) -> str:
    if status == -signal.SIGKILL and memory_kills:
        return "killed by the kernel for lack of memory (SIGKILL)"
    if status == -signal.SIGKILL and memory_kills is None:
        return "killed by SIGKILL, perhaps by the kernel for lack of memory"
    return _status_text(status) + (", and the kernel has killed a process for lack of memory meanwhile" if memory_kills else "")


def _status_text(status: int | None) -> str:
    if status is None:
        return SHIM_LOST
    if status >= 0:
        return f"exit code {status}"
    names = {each.value: each.name for each in signal.Signals}
    return f"signal {names.get(-status, -status)}"
