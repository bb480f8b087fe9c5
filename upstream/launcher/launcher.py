"""All the launched servers of a gateway, and the folders that they need.

Owns the private runtime folder with the unix sockets. The rule: leaving the launcher leaves no process and no
socket behind.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from upstream.launcher.lifecycle import Backoff, LaunchSpec, LaunchStatus
from upstream.launcher.logfile import LogFile
from upstream.launcher.server import LaunchedServer
from upstream.vllm.command_line import problems

SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path (unix(7): sun_path has 108, one of them is the final zero)."""
LONGEST = "/9999/01234567-89ab-cdef-0123-456789abcdef"
"""What comes after the private folder in the longest of these paths: vLLM's own sockets have random UUIDs as names."""


def _close_to_others(folder: Path) -> None:
    """Logs hold what servers say of their requests. A folder that is somebody else's stays as its owner wants it."""
    found = folder.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)


class Launcher:
    """Starts servers, keeps them up and ends them.

    ``on_change`` is called with every new status, in this loop, and must not raise. ``environ`` is what the servers
    inherit. ``runtime_parent`` gets the private folder: by default $XDG_RUNTIME_DIR or the folder for temporary files.

        async with Launcher(on_change=…, log_folder=…, environ=os.environ) as launcher:
            launcher.start(LaunchSpec("MODEL#0", settings, startup_timeout=1200))
            …
            await launcher.stop("MODEL#0", grace=30)
    """

    def __init__(
        self,
        *,
        on_change: Callable[[LaunchStatus], None],
        log_folder: Path,
        environ: Mapping[str, str],
        runtime_parent: str | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._on_change = on_change
        self._log_folder = log_folder
        self._environ = dict(environ)
        self._runtime_parent = runtime_parent or environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        self._backoff = backoff or Backoff()
        self._servers: dict[str, LaunchedServer] = {}
        self._numbers = itertools.count()
        self._folder = ""

    async def __aenter__(self) -> Self:
        """Raises OSError where a folder cannot be made or its path is too long for a socket."""
        self._log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _close_to_others(self._log_folder)
        self._folder = tempfile.mkdtemp(prefix="vllm-gateway-", dir=self._runtime_parent)
        if len(os.fsencode(self._folder + LONGEST)) > SOCKET_PATH_LIMIT:
            os.rmdir(self._folder)
            raise OSError(f"{self._runtime_parent}: this path is too long for unix sockets; XDG_RUNTIME_DIR can name a shorter one")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kills what has not been stopped, without grace."""
        try:
            await asyncio.gather(*(server.kill() for server in self._servers.values()))
        finally:
            self._servers.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, spec: LaunchSpec) -> None:
        """Bring a server up and keep it up until ``stop``.

        Raises ValueError if there is one of this name (also while it is being stopped), or for settings that cannot work.
        """
        if spec.name in self._servers:
            raise ValueError(f"{spec.name} is launched already")
        if wrong := problems(spec.settings):
            raise ValueError("; ".join(wrong))
        self._servers[spec.name] = server = LaunchedServer(
            spec,
            logfile=LogFile(self._log_folder, spec.name),
            folder=self._folder,
            place=f"{self._folder}/{next(self._numbers)}",
            environ=self._environ,
            backoff=self._backoff,
            on_change=self._on_change,
        )
        server.start()

    def restart(self, name: str, why: str, grace: float) -> None:
        """Have a ready server ended as ``stop`` does and started anew, for a reason that its operator is told; returns at once.

        For one that lives and does not work. It leaves its readiness in this moment, so it is out of routing before it
        ends. Nothing is done for one that is not ready. Raises KeyError for a name that is not launched.
        """
        self._servers[name].restart(why, grace)

    def set_startup_timeout(self, name: str, startup_timeout: float) -> None:
        """Have a server's starts last so long, the one under way too; one that was given up for less is started again.

        Raises KeyError for a name that is not launched.
        """
        self._servers[name].set_startup_timeout(startup_timeout)

    async def stop(self, name: str, grace: float) -> None:
        """End a server: SIGTERM, and after ``grace`` seconds SIGKILL to all that is left of it. Its name is free afterwards.

        Take it out of routing first: vLLM fails what it has in flight. Raises KeyError for a name that is not launched.
        """
        server = self._servers[name]
        await server.stop(grace)
        if self._servers.get(name) is server:  # two may have waited here, and one of them may have started it anew
            del self._servers[name]

    def statuses(self) -> tuple[LaunchStatus, ...]:
        """Every server from ``start`` to the end of ``stop``."""
        return tuple(server.status for server in self._servers.values())

    @property
    def specs(self) -> Mapping[str, LaunchSpec]:
        """What each of them was started by."""
        return {name: server.spec for name, server in self._servers.items()}

    def api_key(self, name: str) -> str:
        """The internal key of a launched server; the same for all its restarts. Raises KeyError."""
        return self._servers[name].api_key

    def log(self, name: str) -> LogFile:
        """What a launched server writes to. Raises KeyError."""
        return self._servers[name].log
