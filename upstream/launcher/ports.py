"""Ports of this machine: a free port, and the process that listens on another one.

The rule: nothing is reserved. Another process may take a free port at any moment; the server that wanted the port then fails and reports
it.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from upstream.launcher.shim import read

_LISTENING = b"0A"


class PortTaken(OSError):
    """Another process listens on the port. The text names the port, and the process if it is visible."""


def free_port() -> int:
    """Return a loopback port that is free now. If another process takes it first, the server fails and its next start gets another port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Check that no other process listens on a port. Raises PortTaken. The server itself detects every other problem.

    Called before every start: vLLM shares its port (SO_REUSEPORT), so a second server would start without an error, and the kernel would
    choose which of them gets a connection.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: old connections in TIME_WAIT are not an obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"port {port} of {host} is taken{_by(port)}") from None


def _by(port: int) -> str:
    """Return the process that listens on the port, on any address, as text; empty if it is not visible (proc(5): net/tcp, fd)."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in read(f"/proc/net/{table}").splitlines()[1:]]
    listening = [row for row in rows if row[3] == _LISTENING and int(row[1].rpartition(b":")[2], 16) == port]
    sockets = {f"socket:[{row[9].decode()}]" for row in listening}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if sockets & _descriptors(int(pid)):
            return f" by process {pid} ({read(f'/proc/{pid}/comm').decode(errors='replace').strip()})"
    return ""


def _descriptors(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it has exited, or belongs to another user
        for number in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found
