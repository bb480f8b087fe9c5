"""Containers as far as the kernel alone makes them: namespaces, a read-only root, a user without rights. No daemon, no image store.

The rule: everything hangs on the namespaces of a process that ends with the test, so that no mount, process or interface outlives it.
A network holds containers that reach one another by name at 127.0.0.1, as those of a compose file do at separate addresses.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.deploy.images import Image
from tests.support.process import wait_for

_DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]  # also when the tests are killed
_PROBE = """
import json, sys, urllib.error, urllib.request
url, headers, body = json.loads(sys.argv[1])
request = urllib.request.Request(url, body and json.dumps(body).encode(), headers)
try:
    answer = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
except OSError:
    sys.exit(7)
print(answer.status)
sys.stdout.write(answer.read().decode())
"""


@dataclass(frozen=True, slots=True)
class Network:
    """Loopback only: all ports are free here."""

    pid: int

    @property
    def enter(self) -> list[str]:
        """The words before a command that is to run in it."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def request(self, url: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """GET, or POST of JSON: status and body; (0, "") if nothing listens."""
        given = json.dumps([url, {"content-type": "application/json", **headers}, body])
        arguments = [*self.enter, sys.executable, "-I", "-c", _PROBE, given]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=90)
        assert done.returncode in (0, 7), done.stderr
        status, _, text = done.stdout.partition("\n")
        return int(status or 0), text


@contextmanager
def network() -> Iterator[Network]:
    arguments = [*_DIES_WITH_US, "unshare", "--net", "--", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield Network(process.pid)
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True, slots=True)
class Settings:
    """How a container is to run.

    ``mounts``: a path in it -> what of this machine is there, read-only. ``memory``: its folders that can be written.
    ``hosts``: the names that are 127.0.0.1 to it.
    """

    command: Sequence[str]
    user: str
    environment: Mapping[str, str]
    folder: str
    mounts: Mapping[str, Path] = field(default_factory=dict)
    memory: Sequence[str] = ("/tmp",)
    hosts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """A running container. ``pid``: its first process, in this machine's numbering."""

    pid: int
    outside: subprocess.Popen[bytes]
    settings: Settings
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text() + (self.folder / "stderr").read_text()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Another command in it, as its user."""
        arguments = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--ipc", "--root", "--wd", "--"]
        return subprocess.run([*arguments, *_as_user(self.settings, command)], capture_output=True, text=True, timeout=90)

    def stop(self) -> int:
        """As `docker stop` does. Returns the exit code."""
        psutil.Process(self.pid).send_signal(signal.SIGTERM)
        return self.outside.wait(60)


@contextmanager
def container(image: Image, net: Network, settings: Settings, folder: Path) -> Iterator[Container]:
    """Run it; ``folder`` gets what it writes to its outputs. It is removed in the end, whatever it does."""
    folder.mkdir()
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(settings.hosts)}\n")
    spaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--"]
    script = "\n".join(["set -e", *_prepared(image.root, folder, settings), _started(image.root, settings)])
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        arguments = [*_DIES_WITH_US, *net.enter, *spaces, "sh", "-c", script]
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    try:
        first = wait_for(lambda: psutil.Process(process.pid).children() or process.poll() is not None)
        assert process.poll() is None, (folder / "stderr").read_text()
        yield Container(first[0].pid, process, settings, folder)
    finally:
        if process.poll() is None:
            for each in psutil.Process(process.pid).children():
                each.kill()  # the first one inside, and with it, by the kernel, all others; --kill-child is lost when it changes its user
        process.kill()
        process.wait(60)


def _prepared(root: Path, folder: Path, settings: Settings) -> Iterator[str]:
    """The lines of a shell's script that mount what the container sees."""
    owner = settings.user.partition(":")[0]
    at = shlex.quote(str(root))
    yield f"mount --bind {at} {at}"
    yield f"mount -t tmpfs none {at}/run"
    for path in settings.memory:
        yield f"mount -t tmpfs -o mode=1777,uid={owner} none {at}{shlex.quote(path)}"
    for path, source in {**settings.mounts, "/etc/hosts": folder / "hosts"}.items():
        target, here = f"{at}{shlex.quote(path)}", shlex.quote(str(source))
        made = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p $(dirname {target}); touch {target}"
        yield f"[ -e {target} ] || {{ {made}; }}" if path.startswith("/run/") else f"test -e {target}"
        yield f"mount --bind {here} {target} && mount -o remount,bind,ro {target}"
    yield f"mount -t proc none {at}/proc"
    yield f"mount --rbind /dev {at}/dev"
    yield f"mount -o remount,bind,ro {at}"


def _started(root: Path, settings: Settings) -> str:
    return shlex.join(["exec", "chroot", str(root), *_as_user(settings, settings.command)])


def _as_user(settings: Settings, command: Sequence[str]) -> list[str]:
    """A command with the container's environment, as its user, without privileges."""
    user, _, group = settings.user.partition(":")
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--clear-groups", f"--reuid={user}", f"--regid={group}"]
    names = [f"{name}={value}" for name, value in settings.environment.items()]
    return ["env", "-i", f"--chdir={settings.folder}", *names, "setpriv", *rights, "--", *command]
