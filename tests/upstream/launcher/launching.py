"""A launcher's folders, the stand-in for ``vllm serve`` that it starts, and what it has told."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.faults.invariants import nothing_left
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchSpec, LaunchState, LaunchStatus, RestartPolicy
from upstream.launcher.shim import processes
from upstream.vllm.command_line import ArgumentValue, LaunchSettings

SERVER = Path(__file__).with_name("launched_server.py")
QUICK = RestartPolicy(first=0.05, cap=0.1)
LONG_BACKOFF = RestartPolicy(first=600, cap=600)


def alive(pid: int) -> bool:
    return any(row.pid == pid and row.state not in "ZX" for row in processes())


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.01)


class Case:
    """A launcher's folders, and what it has told."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.runtime = runtime
        self.logs = folder / "logs"
        self.status_updates: list[LaunchStatus] = []

    @asynccontextmanager
    async def launcher(self, restart_policy: RestartPolicy = LONG_BACKOFF) -> AsyncIterator[Launcher]:
        parent = str(self.runtime)
        async with (
            nothing_left(),
            Launcher(
                on_change=self.status_updates.append,
                log_folder=self.logs,
                environ=os.environ,
                runtime_parent=parent,
                restart_policy=restart_policy,
            ) as launcher,
        ):
            yield launcher
        assert list(self.runtime.iterdir()) == []

    def spec(
        self, name: str = "org/m#0", startup_timeout: float = 30.0, env: Mapping[str, str] | None = None, **args: ArgumentValue
    ) -> LaunchSpec:
        flags = {"pids": str(self.pids_file(name))} | {key.replace("_", "-"): value for key, value in args.items()}
        settings = LaunchSettings("org/m", ("org/m", "m"), command=(sys.executable, str(SERVER)), args=flags, env=env or {})
        return LaunchSpec(name, settings, startup_timeout)

    def pids_file(self, name: str) -> Path:
        return self.folder / f"pids-{name.replace('/', '-')}"

    def pids(self, name: str = "org/m#0") -> dict[str, int]:
        """The last process of each role."""
        file = self.pids_file(name)
        lines = file.read_text().splitlines() if file.exists() else []
        return {role: int(pid) for role, pid in (line.split() for line in lines)}

    def states(self, name: str = "org/m#0") -> list[LaunchState]:
        """Each state that was entered, in order."""
        seen = [status.state for status in self.status_updates if status.name == name]
        return [state for before, state in zip([None, *seen], seen, strict=False) if state is not before]

    async def reached(self, state: LaunchState, name: str = "org/m#0", restarts: int = 0) -> LaunchStatus:
        def found() -> list[LaunchStatus]:
            return [status for status in self.status_updates if (status.name, status.state, status.restarts) == (name, state, restarts)]

        await until(lambda: bool(found()))
        return found()[0]
