"""The keeper of one launched server: a small program between control and the server, so that nothing is ever orphaned.

``python -P -m upstream.launcher.shim --name MODEL#0 --control FD [--socket PATH] [--scratch PATH] [--folder PATH] -- COMMAND…``

It leads a session of its own, starts the server as its child and adopts every descendant that loses its parent
(it is a subreaper). The rule: the keeper ends only when no descendant is left, and it kills them all as soon as
the server's main process is gone, control says so, or control itself is gone.

``FD`` is one end of a stream socketpair that control holds the other end of.

* control -> keeper: one line of JSON, ``{"env": {name: value}}``, the server's whole environment; then nothing, or any
  byte for "kill everything now". The end of the stream means that control is gone, by whatever death.
* keeper -> control: ``{"pid": N}`` when the server's process exists, ``{"exit": N}`` at once when it has ended (N as in
  ``subprocess``: negative is the signal). The end of the stream means that the keeper has ended.

SIGTERM is passed on to the server's main process. The environment comes over the socket, so that the server's
Python variables do not reach the keeper and the key is on no command line. At the end ``--socket`` is unlinked and
``--scratch`` removed with all that is in it; ``--folder`` is removed if it is empty and control is gone. Standard
library only, one thread: PR_SET_PDEATHSIG is bound to it.
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
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
"""By the keeper alone: ignored signals stay ignored across exec, so the server gets every one of them back at its default."""

TRACKER_GRACE = 5.0
"""Seconds, at most, that multiprocessing's resource trackers may outlive the rest: they unlink its segments, then end by themselves."""


@dataclass(frozen=True, slots=True)
class ShimOptions:
    """The keeper's command line."""

    name: str
    control: int
    socket: str
    scratch: str
    folder: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> ShimOptions:
        cut = list(argv).index("--")
        named = dict(zip(argv[:cut:2], argv[1:cut:2], strict=True))
        socket_path, scratch, folder = (named.get(option, "") for option in ("--socket", "--scratch", "--folder"))
        return cls(named["--name"], int(named["--control"]), socket_path, scratch, folder, tuple(argv[cut + 1 :]))


@dataclass(frozen=True, slots=True)
class Process:
    """A row of /proc/PID/stat (proc(5)): who it is, its parent, group and session."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def processes() -> Iterator[Process]:
    """Every process that /proc shows."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (line := read(f"/proc/{entry}/stat")):
            # The name in parentheses may hold anything, parentheses too: the fields begin after the last one.
            state, parent, group, session = line.rpartition(b")")[2].split()[:4]
            yield Process(int(entry), state.decode(), int(parent), int(group), int(session))


def descendants(root: int) -> tuple[Process, ...]:
    """Every process below ``root``, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(root, ()))
    for process in found:
        found.extend(children.get(process.pid, ()))
    return tuple(found)


def read(path: str) -> bytes:
    """A file below /proc; empty where its process has ended, or is not ours to look at."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


class Shim:
    """One server's life: start, wait for the first reason to end it, end all of it."""

    def __init__(self, orders: ShimOptions) -> None:
        self._orders = orders
        self._control = socket.socket(fileno=orders.control)
        self._control.set_inheritable(False)  # in the server's hands it would hide the keeper's death from control
        self._woken, self._waker = socket.socketpair()
        self._server = 0
        self._control_gone = False

    def run(self) -> None:
        _lead_a_session()
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._listen_to_signals()
        env = self._receive_environment()
        if env is not None:
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
        """None: control was gone before it had said everything."""
        line = b""
        while not line.endswith(b"\n"):
            if not (part := self._control.recv(65536)):
                self._control_gone = True
                return None
            line += part
        env: dict[str, str] = json.loads(line)["env"]
        return env

    def _start_server(self, env: Mapping[str, str]) -> None:
        keeper = os.getpid()
        self._server = os.fork()
        if self._server == 0:
            _become(self._orders.command, env, keeper)
        self._report(pid=self._server)

    def _wait_for_end(self) -> None:
        """Until the server's main process has ended, or control wants it dead, or control is gone."""
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
        """Take the status of every child that has ended; False when there is no child any more."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._server:
                    self._server = 0
                    self._report(exit=os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            return False
        return True

    def _kill_all(self) -> None:
        """SIGKILL to every descendant until there is none.

        A process that cannot die yet (in the kernel, on a stuck device) keeps the keeper waiting: a server
        started beside it would find the device taken.
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
        try:
            self._control.sendall(json.dumps(report).encode() + b"\n")
        except OSError:
            pass  # control is gone; the next recv says so

    def _clean_up(self) -> None:
        if self._orders.socket:
            unlink_socket(self._orders.socket)
        if self._orders.scratch:
            shutil.rmtree(self._orders.scratch, ignore_errors=True)
        if self._orders.folder and self._is_orphan():
            try:
                os.rmdir(self._orders.folder)
            except OSError:
                pass  # another keeper's files are still in it: the last one takes it away

    def _is_orphan(self) -> bool:
        """Control may have died after the server did, so it is asked once more."""
        self._control.setblocking(False)
        try:
            return self._control_gone or not self._kill_requested()
        except BlockingIOError:
            return False


def _lead_a_session() -> None:
    if os.getsid(0) != os.getpid():
        os.setsid()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _become(command: tuple[str, ...], env: Mapping[str, str], keeper: int) -> None:
    """In the forked child: turn into the server. Never returns."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)  # the keeper died before the death signal was set
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
    """Is it the process by which multiprocessing unlinks its shared memory when all who used it are gone?"""
    return b"multiprocessing.resource_tracker" in read(f"/proc/{pid}/cmdline")


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone already, or is not ours to kill, is passed over."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def unlink_socket(path: str) -> None:
    """Take a unix socket's file away, if there is one; any other kind of file is left alone. Raises OSError."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass  # never made, or taken away by its server


if __name__ == "__main__":
    Shim(ShimOptions.parse(sys.argv[1:])).run()
