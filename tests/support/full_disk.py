"""A real disk that is full, and then is not: a small tmpfs in a mount namespace of the gateway's own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.process import PROGRAM, Gateway

NOT_ALLOWED = "needs unshare, and to be allowed mount namespaces of its own"
_SPACE = ["unshare", "--map-root-user", "--mount", "--"]
_SIZE = "2m"


@cache
def allowed() -> bool:
    """Whether a process of ours may mount a tmpfs."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_SPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False).returncode == 0


def line(folder: Path, *mount_points: Path) -> Sequence[str]:
    """The command line of a gateway, by the gateway.yaml in ``folder``, that has a small tmpfs at each of these places."""
    for path in mount_points:
        path.mkdir(parents=True, exist_ok=True)
    mounts = "".join(f"mount -t tmpfs -o size={_SIZE} none '{path}' && " for path in mount_points)
    return [*_SPACE, "sh", "-c", f'{mounts}exec "$@"', "-", str(PROGRAM), "serve", str(folder / "gateway.yaml")]


@dataclass
class Disk:
    """The tmpfs of a running gateway at one place, reached through its root."""

    gateway: Gateway
    mount_point: Path

    def path(self, name: str = "") -> Path:
        """A file in it, for this process."""
        return Path(f"/proc/{self.gateway.process.pid}/root") / self.mount_point.relative_to("/") / name

    def fill(self) -> None:
        """Leave no byte."""
        with open(self.path("filler"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        """Make room again."""
        self.path("filler").unlink()
