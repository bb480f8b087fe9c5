"""One process of a launched server, seen from control: it and its keeper.

Owns the keeper's process and control's end of the socket to it. The rule: leaving ``shim_process`` leaves no
process of the server behind, however it is left; where the keeper was killed, control does the keeper's work.
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
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from upstream.launcher import shim
from upstream.launcher.lifecycle import SHIM_LOST

log = logging.getLogger(__name__)

MARK = "VLLM_GATEWAY_LAUNCH"
"""A variable with a random value in the server's environment: finds the descendants of a keeper that was killed, wherever they went."""

KILL_PATIENCE = 5.0
PASSES = 100
PASS_PAUSE = 0.02
"""How often, and after how many seconds, control looks again for what a lost keeper has left."""
TRACKER_PASSES = round(shim.TRACKER_GRACE / PASS_PAUSE)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What a keeper is told; ``env`` is the server's whole environment. For the paths see upstream/launcher/shim.py."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    socket: str
    scratch: str
    folder: str


@asynccontextmanager
async def shim_process(order: ServerCommand, output: int, patience: float = KILL_PATIENCE) -> AsyncIterator[ShimProcess]:
    """The server's process, its words written to the descriptor ``output``; on leaving all of it is killed and gone.

    ``patience``: seconds that the keeper has for that, after which control does it and ends the keeper too.
    Raises OSError where the process could not be made. A command that cannot be executed is no error here: it ends
    with exit code 127 and says why in its output.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            keeper_process = await _start_keeper(order, theirs.fileno(), output)
        except BaseException:
            writer.transport.abort()
            raise
        process = ShimProcess(keeper_process, reader, writer, mark := secrets.token_hex(16))  # from its start to here nothing waits
        theirs.close()  # so that the keeper's end is the end of the stream
        try:
            await process.send_environment({**order.env, MARK: mark})
            yield process
        finally:
            await process.kill(patience)


async def _start_keeper(order: ServerCommand, control: int, output: int) -> Process:
    paths = ("--socket", order.socket, "--scratch", order.scratch, "--folder", order.folder)
    command = (
        sys.executable,
        "-P",
        "-m",
        "upstream.launcher.shim",
        "--name",
        order.name,
        "--control",
        str(control),
        *paths,
        "--",
        *order.argv,
    )
    return await create_subprocess_exec(*command, stdin=DEVNULL, stdout=output, stderr=output, pass_fds=(control,), start_new_session=True)


class ShimProcess:
    """A server's process under its keeper. ``pid``: the server's main process."""

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
        """The status of the server's main process, once it has ended, as ``subprocess`` has it; None: the keeper was killed.

        To be asked once.
        """
        report = await self._read_report()
        return report["exit"] if report else None

    async def terminate(self, grace: float) -> None:
        """SIGTERM to the server's main process, and up to ``grace`` seconds for it to end. What is left is for ``kill``."""
        try:
            self._shim.send_signal(signal.SIGTERM)
            async with asyncio.timeout(grace):
                await self._shim.wait()
        except (ProcessLookupError, TimeoutError):
            pass

    async def kill(self, patience: float) -> None:
        """End the server and everything that came of it, at once, and wait until it is gone."""
        try:
            self._writer.write(b"kill\n")
            async with asyncio.timeout(patience):
                await self._shim.wait()
        except TimeoutError:
            pass
        finally:
            self._writer.transport.abort()
            if self._shim.returncode != 0:
                await self._kill_strays()

    async def _kill_strays(self) -> None:
        """The first pass comes before any await: it is made even where this task is being cancelled again."""
        for number in range(PASSES):
            if not (strays := _strays(self._shim.pid, self._mark)):
                break
            for pid in strays:
                if number >= TRACKER_PASSES or not shim.is_resource_tracker(pid):
                    shim.kill(pid)
            await asyncio.sleep(PASS_PAUSE)
        else:
            log.error("these processes do not die: %s", strays)
        await self._shim.wait()

    async def _read_report(self) -> dict[str, int] | None:
        """The keeper's next line; None: there will be none."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        report: dict[str, int] | None = json.loads(line) if line.endswith(b"\n") else None
        return report


def _strays(session: int, mark: str) -> list[int]:
    """The living processes of the keeper's session, the keeper among them, and those that left it but carry the mark."""
    needle = f"{MARK}={mark}".encode()
    alive = [process for process in shim.processes() if process.state not in "ZX"]
    return [process.pid for process in alive if process.session == session or needle in shim.read(f"/proc/{process.pid}/environ")]
