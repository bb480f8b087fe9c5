"""One process of a launched server as control sees it: the server's process and its shim.

Owns the shim's process and control's end of the socket to it. The rule: after ``shim_process`` has exited, on any path, no process of the
server is left. If the shim was killed, control does the shim's work.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from upstream.launcher import shim
from upstream.launcher.lifecycle import SHIM_LOST

log = logging.getLogger(__name__)

MARK = "VLLM_GATEWAY_LAUNCH"
"""A variable with a random value in the server's environment. It identifies the descendants of a killed shim in any session."""

KILL_TIMEOUT = 5.0
PASSES = 100
PASS_PAUSE = 0.02
"""The number of repeated scans for the processes of a killed shim, and the seconds between them."""
TRACKER_PASSES = round(shim.TRACKER_GRACE / PASS_PAUSE)


@asynccontextmanager
async def shim_process(
    command: shim.ServerCommand, env: Mapping[str, str], output: int, timeout: float = KILL_TIMEOUT
) -> AsyncIterator[ShimProcess]:
    """Start a server that writes to the descriptor ``output``, and kill all of its processes on exit.

    ``env``: the server's whole environment. ``timeout``: seconds that the shim has for the kill. Control then does it, and kills the shim
    too. Raises OSError if the process could not be created. A command that cannot be executed is not an error here: it ends with exit
    code 127 and a message in its output.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            shim_of_server = await _start_shim(command, theirs.fileno(), output)
        except BaseException:
            writer.transport.abort()
            raise
        process = ShimProcess(shim_of_server, reader, writer, mark := secrets.token_hex(16))  # no await since its start
        theirs.close()  # so that the shim's exit ends the stream
        try:
            await process.send_environment({**env, MARK: mark})
            yield process
        finally:
            await process.kill(timeout)


async def _start_shim(command: shim.ServerCommand, control: int, output: int) -> Process:
    paths = ("--socket", command.socket, "--scratch", command.scratch, "--folder", command.folder)
    shim = (sys.executable, "-P", "-m", "upstream.launcher.shim", "--name", command.name, "--control", str(control), *paths)
    return await create_subprocess_exec(
        *shim, "--", *command.argv, stdin=DEVNULL, stdout=output, stderr=output, pass_fds=(control,), start_new_session=True
    )


class ShimProcess:
    """A server's process under its shim. ``pid``: the server's main process."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mark: str) -> None:
        self._shim = process
        self._reader = reader
        self._writer = writer
        self._mark = mark
        self.pid = 0

    async def send_environment(self, env: Mapping[str, str]) -> None:
        self._writer.write(json.dumps({"env": env}).encode() + b"\n")
        if (report := await self._read_report()) is None:
            raise ChildProcessError(SHIM_LOST)
        self.pid = report["pid"]

    async def wait_exit(self) -> int | None:
        """Wait for the exit of the server's main process, and return its status as in ``subprocess``; None if the shim was killed.

        Called once.
        """
        report = await self._read_report()
        return report["exit"] if report else None

    async def terminate(self, grace: float) -> None:
        """Send SIGTERM to the server's main process, and wait up to ``grace`` seconds for the shim's exit. ``kill`` ends the rest."""
        with suppress(ProcessLookupError, TimeoutError):
            self._shim.send_signal(signal.SIGTERM)
            async with asyncio.timeout(grace):
                await self._shim.wait()

    async def kill(self, timeout: float) -> None:
        """Kill the server and all its descendants, and wait until they have exited."""
        try:
            self._writer.write(b"kill\n")
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._shim.wait()
        finally:
            self._writer.transport.abort()
            if self._shim.returncode != 0:
                await self._kill_strays()

    async def _kill_strays(self) -> None:
        # The first pass precedes any await, so it runs even if this task is cancelled again.
        for number in range(PASSES):
            if not (strays := _find_strays(self._shim.pid, self._mark)):
                break
            for pid in strays:
                if number >= TRACKER_PASSES or not shim.is_resource_tracker(pid):
                    shim.kill(pid)
            await asyncio.sleep(PASS_PAUSE)
        else:
            log.error("these processes do not exit: %s", strays)
        await self._shim.wait()

    async def _read_report(self) -> dict[str, int] | None:
        """Return the shim's next line; None if the shim has exited."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        report: dict[str, int] | None = json.loads(line) if line.endswith(b"\n") else None
        return report


def _find_strays(session: int, mark: str) -> list[int]:
    """Return the processes of the shim's session, the shim among them, and those of other sessions with the mark."""
    needle = f"{MARK}={mark}".encode()
    alive = [process for process in shim.processes() if process.state not in "ZX"]
    return [process.pid for process in alive if process.session == session or needle in shim.read(f"/proc/{process.pid}/environ")]
