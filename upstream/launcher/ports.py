"""Ports of this machine: one that is free, and who has one that is not.

The rule: nothing is held here. A port that is free now may be taken the next moment; then the server that wanted it
fails and says so itself.
"""

from __future__ import annotations

import errno
import os
import socket

from upstream.launcher.shim import read

_LISTENING = b"0A"


class PortTaken(OSError):
    """Somebody listens there already; the text names the port, and the process if it can be seen."""


def free_port() -> int:
    """A loopback port that is free now. Another process may take it first: the server then fails and its next start gets a new one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(host: str, port: int) -> None:
    """Raises PortTaken where another process listens. Any other obstacle is left for the server to meet.

    Asked before every start: vLLM shares its port (SO_REUSEPORT), so a second one would start without an error, and
    who answers would be left to chance.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what lingers of old connections is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"port {port} of {host} is taken{_by(port)}") from None


def _by(port: int) -> str:
    holder = _holder(port)
    return f" by process {holder} ({read(f'/proc/{holder}/comm').decode(errors='replace').strip()})" if holder else ""


def _holder(port: int) -> int | None:
    """The process that listens on the port, on whatever address; None where it is not ours to see (proc(5): net/tcp, fd)."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if sockets & _descriptors(int(pid)):
            return int(pid)
    return None


def _inodes(port: int) -> set[str]:
    rows = [line.split() for table in ("tcp", "tcp6") for line in read(f"/proc/net/{table}").splitlines()[1:]]
    return {row[9].decode() for row in rows if row[3] == _LISTENING and int(row[1].rpartition(b":")[2], 16) == port}


def _descriptors(pid: int) -> set[str]:
    found = set()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    except OSError:
        pass  # it has ended, or is another user's
    return found
