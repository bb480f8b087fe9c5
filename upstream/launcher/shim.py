"""The shim of one launched server: a small program between control and the server, so that no process of the server is ever orphaned.

``python -P -m upstream.launcher.shim --name MODEL#0 --control FD [--socket PATH] [--scratch PATH] [--folder PATH] -- COMMAND…``

The shim leads a separate session, starts the server as its child, and adopts every descendant that loses its parent (it is a subreaper).
The rule: the shim exits only when no descendant is left. It kills all of them as soon as the server's main process has exited, control
requests it, or control itself has exited.

``FD`` is one end of a stream socket pair. Control has the other end.

* control to shim: one line of JSON, ``{"env": {name: value}}``, the server's whole environment. After it, any byte means "kill everything
  now". The end of the stream means that control has exited.
* shim to control: ``{"pid": N}`` when the server's process exists, and ``{"exit": N}`` as soon as it has exited (N as in ``subprocess``: a
  negative number is a signal). The end of the stream means that the shim has exited.

The shim passes SIGTERM on to the server's main process. The environment comes over the socket, so that the server's Python variables do not
affect the shim, and no command line contains the key. At its end the shim unlinks ``--socket``, removes ``--scratch`` with its content, and
removes ``--folder`` if it is empty and control has exited. Standard library only, one thread: PR_SET_PDEATHSIG is bound to the thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
"""Signals that only the shim ignores.

Ignored signals stay ignored across exec, so the shim resets each of them to its default for the server.
"""

TRACKER_GRACE = 5.0
"""Seconds that multiprocessing's resource trackers may outlive the other processes: they unlink its segments and exit by themselves."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server's process to start, and the paths that are removed after it; an empty path is not removed."""

    name: str
    argv: tuple[str, ...]
    socket: str
    scratch: str
    folder: str


def parse_options(argv: Sequence[str]) -> tuple[int, ServerCommand]:
    """Return the descriptor of the socket to control, and the server's process, by the shim's command line."""
    cut = list(argv).index("--")
    named = dict(zip(argv[:cut:2], argv[1:cut:2], strict=True))
    paths = (named.get(option, "") for option in ("--socket", "--scratch", "--folder"))
    return int(named["--control"]), ServerCommand(named["--name"], tuple(argv[cut + 1 :]), *paths)


@dataclass(frozen=True, slots=True)
class Process:
    """A process by /proc/PID/stat (proc(5))."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def processes() -> Iterator[Process]:
    """Yield every process in /proc."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (line := read(f"/proc/{entry}/stat")):
            # The name in parentheses may contain parentheses itself: the fields start after the last one.
            state, parent, group, session = line.rpartition(b")")[2].split()[:4]
            yield Process(int(entry), state.decode(), int(parent), int(group), int(session))


def descendants(root: int) -> tuple[Process, ...]:
    """Return every descendant of ``root``, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(root, ()))
    for process in found:
        found.extend(children.get(process.pid, ()))
    return tuple(found)


def read(path: str) -> bytes:
    """Read a file below /proc; empty if its process has exited or belongs to another user."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


class Shim:
    """Starts one server, waits for the first reason to end it, and ends all of its processes."""

    def __init__(self, control: int, command: ServerCommand) -> None:
        self._command = command
        self._control = socket.socket(fileno=control)
        self._control.set_inheritable(False)  # an inherited copy would hide the shim's exit from control
        self._woken, self._waker = socket.socketpair()
        self._server = 0
        self._control_gone = False

    def run(self) -> None:
        if os.getsid(0) != os.getpid():
            os.setsid()
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._listen_to_signals()
        if (env := self._receive_environment()) is not None:
            self._start_server(env)
            self._wait_for_end()
            self._kill_all()
        self._clean_up()

    def _listen_to_signals(self) -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def _receive_environment(self) -> dict[str, str] | None:
        """Read the environment; None if control exited before it had sent all of it."""
        line = b""
        while not line.endswith(b"\n"):
            if not (part := self._control.recv(65536)):
                self._control_gone = True
                return None
            line += part
        env: dict[str, str] = json.loads(line)["env"]
        return env

    def _start_server(self, env: Mapping[str, str]) -> None:
        shim = os.getpid()
        self._server = os.fork()
        if self._server == 0:
            _exec_server(self._command.argv, env, shim)
        self._report(pid=self._server)

    def _wait_for_end(self) -> None:
        """Wait until the server's main process has exited, control requests a kill, or control has exited."""
        while self._server:
            readable, _, _ = select.select([self._control, self._woken], [], [])
            if self._control in readable:
                self._control_gone = not self._kill_requested()
                return
            if signal.SIGTERM in self._woken.recv(4096):
                os.kill(self._server, signal.SIGTERM)
            self._reap()

    def _kill_requested(self) -> bool:
        try:
            return bool(self._control.recv(4096))
        except ConnectionError:
            return False

    def _reap(self) -> bool:
        """Reap every child that has exited. Return False if no child is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._server:
                    self._server = 0
                    self._report(exit=os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            return False
        return True

    def _kill_all(self) -> None:
        """Send SIGKILL to every descendant until none is left.

        The shim waits for a process that cannot exit yet (in the kernel, on a stuck device): another server would find the device in use.
        """
        trackers_until = time.monotonic() + TRACKER_GRACE
        pause = 0.005
        while self._reap():
            for process in descendants(os.getpid()):
                if time.monotonic() >= trackers_until or not is_resource_tracker(process.pid):
                    kill(process.pid)
            time.sleep(pause)
            pause = min(pause * 2, 0.2)

    def _report(self, **report: int) -> None:
        with suppress(OSError):  # control has exited; the next recv shows it
            self._control.sendall(json.dumps(report).encode() + b"\n")

    def _clean_up(self) -> None:
        if self._command.socket:
            unlink_socket(self._command.socket)
        if self._command.scratch:
            shutil.rmtree(self._command.scratch, ignore_errors=True)
        if self._command.folder and self._is_orphan():
            with suppress(OSError):  # another shim's files are still in it; the last shim removes it
                os.rmdir(self._command.folder)

    def _is_orphan(self) -> bool:
        """Return whether control has exited. It may have exited after the server, so its socket is read again."""
        self._control.setblocking(False)
        try:
            return self._control_gone or not self._kill_requested()
        except BlockingIOError:
            return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _exec_server(command: tuple[str, ...], env: Mapping[str, str], shim: int) -> None:
    """Execute the server, in the forked child. Never returns."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(1)  # the shim exited before the death signal was set
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, env)  # noqa: S606 - the operator's command, no shell
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]}: {getattr(error, 'strerror', error)}\n".encode())
    finally:
        os._exit(127)


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker, by which multiprocessing unlinks its shared memory after its users have exited."""
    return b"multiprocessing.resource_tracker" in read(f"/proc/{pid}/cmdline")


def kill(pid: int) -> None:
    """Send SIGKILL to a process. Ignores a process that has exited, or that belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def unlink_socket(path: str) -> None:
    """Remove the file of a unix socket, if it exists. Leaves any other kind of file. Raises OSError."""
    with suppress(FileNotFoundError):  # never created, or removed by its server
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


if __name__ == "__main__":
    Shim(*parse_options(sys.argv[1:])).run()
