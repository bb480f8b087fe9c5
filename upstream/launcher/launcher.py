"""The launched servers of a gateway, and their folders.

Owns the private runtime folder with the unix sockets. The rule: after the launcher has exited, no process and no socket is left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from upstream.launcher.lifecycle import LaunchSpec, LaunchStatus, RestartPolicy
from upstream.launcher.logfile import LogFile
from upstream.launcher.server import LaunchedServer
from upstream.vllm.command_line import problems

SOCKET_PATH_LIMIT = 107
"""Bytes of a unix socket's path (unix(7): sun_path has 108, including the final zero)."""
LONGEST = "/9999/01234567-89ab-cdef-0123-456789abcdef"
"""The longest of these paths below the private folder: vLLM's sockets have random UUIDs as names."""


@dataclass(kw_only=True, eq=False, repr=False)
class Launcher:
    """Starts, restarts and stops servers.

    ``on_change`` is called with every new status, in this loop, and must not raise. The servers inherit ``environ``. The private folder is
    created in ``runtime_parent``: by default $XDG_RUNTIME_DIR or the folder for temporary files.

        async with Launcher(on_change=…, log_folder=…, environ=os.environ) as launcher:
            launcher.start(LaunchSpec("MODEL#0", settings, startup_timeout=1200))
            …
            await launcher.stop("MODEL#0", grace=30)
    """

    on_change: Callable[[LaunchStatus], None]
    log_folder: Path
    environ: Mapping[str, str]
    runtime_parent: str | None = None
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    servers: dict[str, LaunchedServer] = field(init=False, default_factory=dict)
    """The servers from ``start`` to the end of ``stop``, by name. Only this class adds and removes them."""
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)
    _folder: str = field(init=False, default="")

    async def __aenter__(self) -> Self:
        """Create the folders. Raises OSError if a folder cannot be created, or its path is too long for a socket."""
        self.log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Deny access to other users, because logs contain text of requests. A folder of another user is not touched.
        status = self.log_folder.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
            self.log_folder.chmod(0o700)
        parent = self.runtime_parent or self.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="vllm-gateway-", dir=parent)
        if len(os.fsencode(self._folder + LONGEST)) > SOCKET_PATH_LIMIT:
            os.rmdir(self._folder)
            raise OSError(f"{parent}: this path is too long for unix sockets; set XDG_RUNTIME_DIR to a shorter one")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the servers that were not stopped."""
        try:
            await asyncio.gather(*(server.kill() for server in self.servers.values()))
        finally:
            self.servers.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, spec: LaunchSpec) -> None:
        """Start a server, and restart it after failures until ``stop``.

        Raises ValueError if a server of this name exists (also while it is being stopped), or for settings that cannot work.
        """
        if spec.name in self.servers:
            raise ValueError(f"{spec.name} is launched already")
        if wrong := problems(spec.settings):
            raise ValueError("; ".join(wrong))
        self.servers[spec.name] = server = LaunchedServer(
            spec=spec,
            log=LogFile(self.log_folder, spec.name),
            folder=self._folder,
            scratch=f"{self._folder}/{next(self._numbers)}",
            environ=self.environ,
            restart_policy=self.restart_policy,
            on_change=self.on_change,
        )
        server.start()

    async def stop(self, name: str, grace: float) -> None:
        """Stop a server: SIGTERM, and after ``grace`` seconds SIGKILL to its remaining processes. Its name is free afterwards.

        Take it out of rotation first: vLLM fails its requests in flight. Raises KeyError for a name that is not launched.
        """
        server = self.servers[name]
        await server.stop(grace)
        if self.servers.get(name) is server:  # another waiting caller may have started it again
            del self.servers[name]

    def statuses(self) -> tuple[LaunchStatus, ...]:
        """Return the status of every server from ``start`` to the end of ``stop``."""
        return tuple(server.status for server in self.servers.values())
