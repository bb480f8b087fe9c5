"""Runs a command under a unit's filter of system calls: ``python confined.py UNIT COMMAND…``. Standard library and libseccomp.

The groups (``@system-service``) are what systemd-analyze says they are. Any other call fails with EPERM, as in the unit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator

_ALLOW = 0x7FFF0000  # SCMP_ACT_ALLOW
_ERRNO = 0x00050000  # SCMP_ACT_ERRNO
_UNKNOWN = -1  # __NR_SCMP_ERROR: a call of another architecture


def names(argument: str) -> Iterator[str]:
    """The system calls that a word of a filter stands for."""
    if not argument.startswith("@"):
        yield argument
        return
    listed = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter", argument], capture_output=True, text=True, check=True
    ).stdout
    for line in listed.splitlines()[1:]:
        inner = line.strip()
        if inner and not inner.startswith("#"):
            yield from names(inner)


def confine(allowed: set[str]) -> None:
    """Let this process and its children make these system calls alone."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    for name in sorted(allowed):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != _UNKNOWN:
            library.seccomp_rule_add(context, ctypes.c_uint32(_ALLOW), ctypes.c_int(number), ctypes.c_uint(0))
    if failed := library.seccomp_load(context):
        raise OSError(-failed, os.strerror(-failed))


def filters(pid: int) -> int:
    """How many filters hold for a process."""
    with open(f"/proc/{pid}/status") as lines:
        return int(next(line.split()[1] for line in lines if line.startswith("Seccomp_filters:")))


def main(unit: str, *command: str) -> None:
    with open(unit) as lines:
        arguments = [argument for line in lines if line.startswith("SystemCallFilter=") for argument in line.partition("=")[2].split()]
    confine({name for argument in arguments for name in names(argument)})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
