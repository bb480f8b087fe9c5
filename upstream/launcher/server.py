"""One launched server, over all of its processes.

Owns its state, its key and the task that starts, watches and restarts it. The rule: every change of state is reported
immediately, and follows ``TRANSITIONS``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from upstream.http.address import Address
from upstream.launcher import memory
from upstream.launcher.lifecycle import TRANSITIONS, Failure, LaunchSpec, LaunchState, LaunchStatus, RestartPolicy, describe_exit
from upstream.launcher.logfile import LogFile
from upstream.launcher.ports import check_free, free_port
from upstream.launcher.shim import ServerCommand, unlink_socket
from upstream.launcher.shim_process import ShimProcess, shim_process
from upstream.vllm.command_line import RPC_FOLDER, address_for, command_line, lacks_uds_option
from upstream.vllm.failures import Cause, ProcessExit, find_cause
from upstream.vllm.health import HealthCheck, ProbeTarget

log = logging.getLogger(__name__)

POLL = 0.25
"""Seconds between two probes of /health while a server starts."""
PROBE_DEADLINE = 5.0
LOG_CHECK = 1.0
"""Seconds between two checks of the log, for its size and for progress."""


@dataclass(kw_only=True, eq=False, repr=False)
class LaunchedServer:
    """A replica that should be up. ``api_key``: the internal key of all its processes, the same for all its restarts.

    ``scratch``: a path in the private ``folder`` for this server alone. With ``.sock`` it is the server's socket. As a folder it is for the
    server's own files (vLLM's sockets between its processes, which vLLM does not remove).
    """

    spec: LaunchSpec
    log: LogFile
    folder: str
    scratch: str
    environ: Mapping[str, str]
    restart_policy: RestartPolicy
    on_change: Callable[[LaunchStatus], None]
    _grace: float = field(init=False, default=0.0)
    _failures: int = field(init=False, default=0)
    _ready_since: float | None = field(init=False, default=None)
    _memory_kills: int | None = field(init=False, default=None)
    _restart_request: asyncio.Future[tuple[str, float]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._settings = self.spec.settings
        self.api_key = secrets.token_urlsafe(32)
        self._resume_starts = asyncio.Event()
        self.status = LaunchStatus(self.spec.name, LaunchState.STARTING, time.time(), self._address(), self.log.path)

    def start(self) -> None:
        """Start the server. Called once, before ``stop`` or ``kill``."""
        self.on_change(self.status)
        self._task = asyncio.create_task(self._run(), name=f"launch {self.spec.name}")
        self._task.add_done_callback(self._task_done)

    def restart(self, why: str, grace: float) -> None:
        """Stop the current process as ``stop`` does, then start a new process. Returns immediately. ``why`` is reported to the operator.

        Use it for a server that runs but does not work. It counts as not ready immediately, so it is out of rotation before it stops. Has
        no effect on a server that is not ready.
        """
        if self.status.state is LaunchState.READY and self._restart_request is not None and not self._restart_request.done():
            self._restart_request.set_result((why, grace))

    def set_startup_timeout(self, startup_timeout: float) -> None:
        """Change the timeout of a start in seconds, also for a start in progress. A server that was given up starts again."""
        if startup_timeout != self.spec.startup_timeout:
            self.spec = replace(self.spec, startup_timeout=startup_timeout)
            if self.status.given_up:
                self._resume_starts.set()

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and after ``grace`` seconds SIGKILL to the remaining processes. A second call waits for the first one."""
        if self.status.state not in (LaunchState.STOPPING, LaunchState.STOPPED):
            self._start_stopping(grace)
        await asyncio.wait([self._task])

    async def kill(self) -> None:
        """Send SIGKILL to all processes immediately, even while ``stop`` waits."""
        if self.status.state is LaunchState.STOPPING:
            self._task.cancel()
        else:
            self._start_stopping(0.0)
        await asyncio.wait([self._task])

    def _start_stopping(self, grace: float) -> None:
        self._grace = grace
        self._change_state(LaunchState.STOPPING)
        self._task.cancel()

    async def _run(self) -> None:
        """Run one process after the other until cancelled, unless they fail too often."""
        while True:
            await self._run_process()
            if self.status.given_up:
                self._update(pid=None)
                await self._resume_starts.wait()
                self._resume_starts.clear()
                self._failures = 1
            self._change_state(LaunchState.BACKING_OFF, pid=None, given_up=False)
            await asyncio.sleep(self.restart_policy.pause(self._failures))
            self._change_state(LaunchState.STARTING, address=self._address(), restarts=self.status.restarts + 1)

    async def _run_process(self) -> None:
        """Run one process, until none of its descendants is left."""
        self._ready_since = None
        self._memory_kills = memory.kills()
        try:
            with self.log.appending() as output:
                async with _running(self._watch_log()), shim_process(*self._server_command(), output) as process:
                    await self._supervise(process)
        except OSError as error:
            self._report_failure(ProcessExit(str(error)))
        except Exception as error:  # the outer edge: the next process may succeed, and the other servers continue
            log.exception("launch of %s", self.spec.name)
            self._report_failure(ProcessExit(repr(error)))

    def _server_command(self) -> tuple[ServerCommand, dict[str, str]]:
        """Prepare the next process: remove the files of the last one, and check its port. Return it and its environment. Raises OSError."""
        address = self.status.address
        if address.uds:
            unlink_socket(address.uds)
        else:
            check_free(address.host, address.port)
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.mkdir(self.scratch, 0o700)
        line = command_line(self._settings, address, self.api_key, self.scratch)
        env = {**self.environ, RPC_FOLDER: self.scratch, **line.env}
        return ServerCommand(self.spec.name, line.argv, address.uds or "", self.scratch, self.folder), env

    async def _supervise(self, process: ShimProcess) -> None:
        self._update(pid=process.pid)
        ended = asyncio.create_task(process.wait_exit())
        try:
            if (why := await self._wait_until_ready(ended)) is None:
                self._ready_since = time.monotonic()
                self._restart_request = asyncio.get_running_loop().create_future()
                self._change_state(LaunchState.READY, first_start_finished=True, reason="", cause=None, tail="", progress="")
                why = await self._wait_for_end(process, ended, self._restart_request)
            self._report_failure(why)
        except asyncio.CancelledError:
            await process.terminate(self._grace)
            raise
        finally:
            ended.cancel()

    async def _wait_until_ready(self, ended: asyncio.Task[int | None]) -> ProcessExit | None:
        """Wait until the server is healthy, and return None, or why it will not be."""
        began = asyncio.get_running_loop().time()
        check = HealthCheck(ProbeTarget(self.spec.name, self.status.address, self.api_key), PROBE_DEADLINE)
        try:
            while not ended.done():
                async with asyncio.timeout_at(began + self.spec.startup_timeout):  # read again, because it may change meanwhile
                    if (result := await check.run()) is not None and result.up:
                        return None
                    await asyncio.wait([ended], timeout=POLL)
        except TimeoutError:
            return ProcessExit(f"no response to GET /health within {self.spec.startup_timeout:g} s")
        return self._exit_of(ended)

    async def _wait_for_end(
        self, process: ShimProcess, ended: asyncio.Task[int | None], request: asyncio.Future[tuple[str, float]]
    ) -> ProcessExit:
        """Wait for the end of readiness, and return its reason. A restart is reported before its process is stopped."""
        either: tuple[asyncio.Future[Any], ...] = (ended, request)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return self._exit_of(ended)
        why, grace = request.result()
        self._report_failure(restarted := ProcessExit(f"it is restarted: {why}"))
        await process.terminate(grace)
        return restarted

    def _exit_of(self, ended: asyncio.Task[int | None]) -> ProcessExit:
        before, after = self._memory_kills, memory.kills()
        return describe_exit(ended.result(), None if before is None or after is None else after - before)

    async def _watch_log(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK)
            try:
                self.log.rotate()
            except OSError as error:
                log.warning("log of %s: %s", self.spec.name, error)  # not a reason to stop the server
            if self.status.state is LaunchState.STARTING and (line := self.log.progress()) != self.status.progress:
                self._update(progress=line)

    def _report_failure(self, ended: ProcessExit) -> None:
        """Report the first failure of a process, and ignore later failures."""
        what = {LaunchState.STARTING: "could not start", LaunchState.READY: "ended"}.get(self.status.state)
        if what is None:
            return
        starting = self.status.state is LaunchState.STARTING
        ready_for = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        self._failures = self.restart_policy.count_failures(self._failures, ready_for)
        given_up = self._failures >= self.restart_policy.limit
        state = LaunchState.FAILED if given_up or starting else LaunchState.CRASHED
        tail = self.log.tail()
        if starting and self.status.address.uds and lacks_uds_option(tail):
            self._settings = replace(self._settings, listen="tcp")
            what += " on a unix socket and is tried on a loopback port next"
        # A server that was ready may have run for long: an old log line does not explain its exit.
        cause = find_cause(self.log.text(recent=not starting), ended)
        reason = f"{self.spec.name} {what}: {_explained(cause, ended)}"
        if given_up:
            reason += f". It has failed {self._failures} times in a row and stays down until it is restarted or its configuration changes"
        known = {"reason": reason, "cause": cause, "tail": tail, "progress": "", "last_failure": Failure(time.time(), cause.code, reason)}
        self._change_state(state, first_start_finished=True, given_up=given_up, **known)

    def _task_done(self, _: asyncio.Task[None]) -> None:
        if self.status.state is LaunchState.STOPPING:
            self._change_state(LaunchState.STOPPED, pid=None)

    def _change_state(self, state: LaunchState, **known: Any) -> None:
        assert state in TRANSITIONS[self.status.state], f"{self.status.state} -> {state}"
        self._update(state=state, since=time.time(), **known)

    def _update(self, **known: Any) -> None:
        self.status = replace(self.status, **known)
        self.on_change(self.status)

    def _address(self) -> Address:
        return address_for(self._settings, uds=f"{self.scratch}.sock", free_port=free_port)


def _explained(cause: Cause, ended: ProcessExit) -> str:
    """Return the root cause and how the process ended, as text."""
    if not cause.headline:
        return ended.text
    return cause.headline if ended.text in cause.headline else f"{cause.headline} ({ended.text})"


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` in a task during the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
