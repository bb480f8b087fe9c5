"""The admin socket: where commands reach the gateway that runs with a configuration.

Owns the place of the socket and who may use it. The rule: three things keep others out, each by itself: a folder
that only this user may enter, the socket's own mode, and the kernel's word on who is at the other end.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gateway.admin.connection import AdminProtocol

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_ROOT = 0


class SocketTakenError(Exception):
    """Another gateway that is alive listens there."""


def socket_path(file: Path, environ: Mapping[str, str]) -> Path:
    """Where the gateway of the configuration ``file`` listens.

    It depends on the file's path as it is written, made absolute: what a symbolic link leads to may change while
    the gateway runs, as in a mounted ConfigMap.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "vllm-gateway" if runtime else Path(f"/tmp/vllm-gateway-{os.geteuid()}")  # noqa: S108  checked before use
    return folder / f"{hashlib.sha256(os.path.abspath(file).encode()).hexdigest()[:16]}.sock"


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen there; what a dead gateway has left is replaced. In the end the socket is gone.

    Raises SocketTakenError, and OSError where the folder or the socket can't be had.
    """
    _private(path.parent)
    _clear(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        identity = path.stat().st_ino
        try:
            path.chmod(0o600)
            listener.listen()
            yield listener
        finally:
            if path.exists() and path.stat().st_ino == identity:
                path.unlink()


def _private(folder: Path) -> None:
    """Make the folder, or make sure that it is nobody else's. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises SocketTakenError."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise SocketTakenError(f"another gateway runs with this configuration (it answers on {path})")


class Peer(NamedTuple):
    """Who is at the other end of a unix socket."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"uid {self.uid} (pid {self.pid})"


def peer(connection: socket.socket) -> Peer:
    """As the kernel noted it when the connection was made."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


class OwnUsersProtocol(AdminProtocol):
    """A connection of the user that runs the gateway, or of root; any other is cut before it has said anything.

    Its requests have ``who`` in their state.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        who = peer(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "who": str(who)}
        if who.uid not in (os.geteuid(), _ROOT):
            transport.abort()
