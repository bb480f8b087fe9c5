"""Owns the environments of the peers that come from PyPI. Run by `make bench-peers`; standard library only.

Each is a virtual environment in the user's cache, named after what it is made from (`environments/NAME.lock`, the interpreter and the
machine), so that a second clone pays nothing. Rule: the mark is written last; a folder without it is created again. A peer that cannot be
installed does not affect the others: it is printed, and the run reports it as absent.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

LOCKS = Path(__file__).resolve().parent / "environments"
PEERS = tuple(sorted(lock.stem for lock in LOCKS.glob("*.lock")))
MARK = ".complete"


def main(names: Sequence[str] = PEERS) -> int:
    """Make what is missing. Returns the exit code: 1 when a peer could not be installed."""
    failed = [name for name in names if not refreshed(name)]
    for name in failed:
        print(f"install.py: {name} could not be installed; pip's own words are above", file=sys.stderr)
    return 1 if failed else 0


def environment(name: str) -> Path:
    """Where a peer's environment is, or would be."""
    ingredients = [(LOCKS / f"{name}.lock").read_text(), sys.version, sys.base_prefix, platform.machine()]
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-gateway" / f"peer-{name}-{key}"


def installed(name: str) -> bool:
    """Whether a peer's environment has been made, to the end."""
    return (environment(name) / MARK).exists()


def refreshed(name: str) -> bool:
    """Make a peer's environment unless it is there; whether it is there now."""
    folder = environment(name)
    if installed(name):
        return True
    print(f"Installing {name} into {folder} …", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    arguments = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(LOCKS / f"{name}.lock")]
    if subprocess.run([*pip, *arguments], check=False, env={**os.environ, "PIP_NO_INPUT": "1"}).returncode:
        return False
    (folder / MARK).touch()
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PEERS))
