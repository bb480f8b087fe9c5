"""The admin socket, through which commands reach the gateway of a configuration.

Owns the path of the socket and its access control. The rule: each of three checks alone keeps other users out: the mode of the folder, the
mode of the socket, and the user of the client as the kernel reports it.
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

from gateway.access.actor import Actor, Requester, Role
from gateway.admin.connection import AdminProtocol

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_ROOT = 0


class SocketTakenError(Exception):
    """Another running gateway listens on the socket."""


def socket_path(file: Path, environ: Mapping[str, str]) -> Path:
    """Return the path of the socket for the configuration ``file``.

    It depends on the absolute path without resolving symbolic links, whose target may change while the gateway runs, as in a mounted
    ConfigMap.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "vllm-gateway" if runtime else Path(f"/tmp/vllm-gateway-{os.geteuid()}")  # noqa: S108  checked before use
    return folder / f"{hashlib.sha256(os.path.abspath(file).encode()).hexdigest()[:16]}.sock"


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen on the socket for the length of the block, and remove it afterwards. A stale socket is replaced.

    Raises SocketTakenError, and OSError if the folder or the socket cannot be created.
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
    """Create the folder, or check that it belongs to this user. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _clear(path: Path) -> None:
    """Remove a stale socket. Raises SocketTakenError if a gateway listens on it."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise SocketTakenError(f"another gateway runs with this configuration (it responds on {path})")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user of a connection's client, as the kernel recorded them at the connect."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class OwnUsersProtocol(AdminProtocol):
    """A connection of the gateway's user or of root. Others are closed before they can send a request.

    Requests have their ``requester`` in their state. Its role is ``admin``.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        pid, uid = peer(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "requester": Requester(Actor("socket", f"uid {uid}", Role.ADMIN), f"pid {pid}")}
        if uid not in (os.geteuid(), _ROOT):
            transport.abort()
