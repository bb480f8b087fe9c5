"""A substitute for systemctl with one service, for install.sh below a prefix. Standard library only.

STANDIN_UNIT is the unit's file, and STANDIN_PID the file with the process ID of the service. ``restart`` returns when the service has sent
READY=1, and fails if it ends before, as with ``Type=notify``. The rule: it leaves no process but the service.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

UNIT, PID = Path(os.environ["STANDIN_UNIT"]), Path(os.environ["STANDIN_PID"])


def main() -> None:
    """Run one command of systemctl."""
    command = sys.argv[1]
    if command == "show":
        print(main_pid())
    elif command in ("restart", "stop"):
        stop()
        sys.exit(0 if command == "stop" or start() else 1)


def main_pid() -> int:
    """Return the process ID of the service, 0 if it does not run."""
    pid = int(PID.read_text()) if PID.exists() else 0
    return pid if Path(f"/proc/{pid}/exe").exists() else 0


def stop() -> None:
    """End the service."""
    if pid := main_pid():
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [])
        os.close(process)
    PID.unlink(missing_ok=True)


def start() -> bool:
    """Start the service, and return whether it becomes ready."""
    lines = [line.partition("=") for line in UNIT.read_text().splitlines()]
    environment = dict(value.split("=", 1) for name, _, value in lines if name == "Environment")
    command = next(value.split() for name, _, value in lines if name == "ExecStart")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox, PID.with_suffix(".log").open("ab") as log:
        inbox.bind("")
        address = "@" + inbox.getsockname()[1:].decode()
        environment |= {"NOTIFY_SOCKET": address, "FROM_THE_SERVICE": "yes"}
        service = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        PID.write_text(str(service.pid))
        process = os.pidfd_open(service.pid)
        while True:
            readable, _, _ = select.select([inbox.fileno(), process], [], [])
            if inbox.fileno() in readable and b"READY=1" in inbox.recv(65536).split(b"\n"):
                return True
            if process in readable:
                return False
