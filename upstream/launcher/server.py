"""One launched server over all the processes that it has in its life.

Owns its state, its key and the one task that starts it, watches it and starts it again. The rule: every change of
state is told at once, and a state is left only by the way that ``TRANSITIONS`` shows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from upstream.address import Address
from upstream.health import Target, doctor
from upstream.keeper import unlink_socket
from upstream.launcher.kept import KeptProcess, Order, kept_process
from upstream.launcher.lifecycle import TRANSITIONS, Backoff, LaunchSpec, Snapshot, State
from upstream.launcher.logfile import LogFile
from upstream.vllm import address_for, command_line, knows_no_uds

log = logging.getLogger(__name__)

POLL = 0.25
"""Seconds between two looks at /health of a server that is starting."""
LOOK_DEADLINE = 5.0
LOG_CHECK = 10.0
"""Seconds between two looks at the size of a ready server's log."""


class LaunchedServer:
    """A replica that is to be up. ``api_key`` is the internal key of all its processes. ``socket_path`` is in the private ``folder``."""

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        logfile: LogFile,
        folder: str,
        socket_path: str,
        environ: Mapping[str, str],
        backoff: Backoff,
        on_change: Callable[[Snapshot], None],
    ) -> None:
        self.spec = spec
        self._settings = spec.settings
        self.api_key = secrets.token_urlsafe(32)
        self.log = logfile
        self._folder = folder
        self._socket_path = socket_path
        self._environ = environ
        self._backoff = backoff
        self._on_change = on_change
        self._grace = 0.0
        self._ready_since: float | None = None
        self.snapshot = Snapshot(spec.name, State.STARTING, time.time(), self._address(), logfile.path)

    def begin(self) -> None:
        """Start it. To be called once, before ``stop`` or ``kill``."""
        self._on_change(self.snapshot)
        self._task = asyncio.create_task(self._run(), name=f"launch {self.spec.name}")
        self._task.add_done_callback(self._ended)

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to all that is left after ``grace`` seconds. A second call waits for the first one's end."""
        if self.snapshot.state is not State.STOPPING:
            self._begin_to_stop(grace)
        await asyncio.wait([self._task])

    async def kill(self) -> None:
        """SIGKILL to all of it, now, even where ``stop`` has begun."""
        if self.snapshot.state is State.STOPPING:
            self._task.cancel()
        else:
            self._begin_to_stop(0.0)
        await asyncio.wait([self._task])

    def _begin_to_stop(self, grace: float) -> None:
        self._grace = grace
        self._enter(State.STOPPING)
        self._task.cancel()

    async def _run(self) -> None:
        """Until it is cancelled: one process after the other."""
        failures = 0
        while True:
            ready_for = await self._one_process()
            failures = self._backoff.failures(failures, ready_for)
            self._enter(State.BACKING_OFF, pid=None)
            await asyncio.sleep(self._backoff.pause(failures))
            self._enter(State.STARTING, address=self._address(), restarts=self.snapshot.restarts + 1)

    async def _one_process(self) -> float:
        """From its start until nothing is left of it; the seconds that it was ready."""
        self._ready_since = None
        try:
            with self.log.appending() as output:
                async with kept_process(self._order(), output) as process:
                    await self._live(process)
        except OSError as error:
            self._went_wrong(str(error))
        except Exception as error:  # the outer edge: the next process may fare better, and the other servers go on
            log.exception("launch of %s", self.spec.name)
            self._went_wrong(repr(error))
        return self._ready_seconds()

    def _ready_seconds(self) -> float:
        return 0.0 if self._ready_since is None else time.monotonic() - self._ready_since

    def _order(self) -> Order:
        """What to start next, with nothing of a former process in its way. Raises OSError."""
        address = self.snapshot.address
        if address.uds:
            unlink_socket(address.uds)
        line = command_line(self._settings, address, self.api_key)
        return Order(self.spec.name, line.argv, {**self._environ, **line.env}, address.uds or "", self._folder)

    async def _live(self, process: KeptProcess) -> None:
        self._update(pid=process.pid)
        try:
            why = await self._until_ready(process)
            if why is None:
                self._ready_since = time.monotonic()
                self._enter(State.READY, concluded=True, reason="")
                why = await self._until_ended(process)
            self._went_wrong(why)
        except asyncio.CancelledError:
            await process.end(self._grace)
            raise

    async def _until_ready(self, process: KeptProcess) -> str | None:
        """None: it answers. Otherwise why it does not."""
        timeout = self.spec.startup_timeout
        async with doctor(Target(self.spec.name, self.snapshot.address, self.api_key), LOOK_DEADLINE) as by:
            try:
                async with asyncio.timeout(timeout):
                    while not (await by.look()).up:
                        if why := await self._ended_within(process, POLL):
                            return why
            except TimeoutError:
                return f"no answer to GET /health within {timeout:g} s"
        return None

    async def _until_ended(self, process: KeptProcess) -> str:
        while (why := await self._ended_within(process, LOG_CHECK)) is None:
            pass
        return why

    async def _ended_within(self, process: KeptProcess, seconds: float) -> str | None:
        try:
            self.log.keep_bounded()
        except OSError as error:
            log.warning("log of %s: %s", self.spec.name, error)  # no reason to end the server
        return await process.ended_within(seconds)

    def _went_wrong(self, why: str) -> None:
        """The first cause is the one that is told."""
        after = {State.STARTING: (State.FAILED, "could not start"), State.READY: (State.CRASHED, "ended")}
        if self.snapshot.state in after:
            state, what = after[self.snapshot.state]
            tail = self.log.tail()
            if state is State.FAILED and self.snapshot.address.uds and knows_no_uds(tail):
                self._settings = replace(self._settings, listen="tcp")
                what += " on a unix socket and is tried on a loopback port next"
            last_lines = f". Last lines of its log:\n{tail}" if tail else ""
            self._enter(state, concluded=True, reason=f"{self.spec.name} {what}: {why}{last_lines}")

    def _ended(self, _: asyncio.Task[None]) -> None:
        if self.snapshot.state is State.STOPPING:
            self._enter(State.STOPPED, pid=None)

    def _enter(self, state: State, **known: Any) -> None:
        assert state in TRANSITIONS[self.snapshot.state], f"{self.snapshot.state} -> {state}"
        self._update(state=state, since=time.time(), **known)

    def _update(self, **known: Any) -> None:
        self.snapshot = replace(self.snapshot, **known)
        self._on_change(self.snapshot)

    def _address(self) -> Address:
        return address_for(self._settings, uds=self._socket_path, free_port=_free_port)


def _free_port() -> int:
    """A loopback port that is free now. Another process may take it first: the server then fails and its next start gets a new one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
