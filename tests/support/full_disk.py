"""A real disk that fills up and is freed again: a small tmpfs in a separate mount namespace of the gateway."""

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
    """Return whether a process of the tests may mount a tmpfs."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_SPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False).returncode == 0


def line(folder: Path, *mount_points: Path) -> Sequence[str]:
    """Return the command line of a gateway with ``folder``/gateway.yaml and a small tmpfs at each mount point."""
    for path in mount_points:
        path.mkdir(parents=True, exist_ok=True)
    mounts = "".join(f"mount -t tmpfs -o size={_SIZE} none '{path}' && " for path in mount_points)
    return [*_SPACE, "sh", "-c", f'{mounts}exec "$@"', "-", str(PROGRAM), "serve", str(folder / "gateway.yaml")]


@dataclass
class Disk:
    """One tmpfs of a running gateway, reached through the root of its process."""

    gateway: Gateway
    mount_point: Path

    def path(self, name: str = "") -> Path:
        """Return the path of a file in the tmpfs, as this process sees it."""
        return Path(f"/proc/{self.gateway.process.pid}/root") / self.mount_point.relative_to("/") / name

    def fill(self) -> None:
        """Fill the disk completely."""
        with open(self.path("filler"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        """Free the space again."""
        self.path("filler").unlink()
