"""Install the environments of the third-party clients, for the tests in this folder. Run by `make clients`; standard library only.

Each Python environment is `.venv-clients-NAME`, made from `environments/NAME.lock`; the Node one is `environments/node/node_modules`, made
from its package-lock.json. Rule: the mark, a hash of what an environment is made from, is written last; one whose mark is missing or of
another lock is created again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCKS = HERE / "environments"
PYTHONS = ("older", "litellm", "current")
NODE = LOCKS / "node"
MARK = ".complete"

Builder = Callable[[Path, Path], None]


class InstallError(Exception):
    """An environment cannot be created. The message names the failed command."""


def main() -> int:
    """Create the missing environments. Return the exit code."""
    pythons = ((environment(name), LOCKS / f"{name}.lock", build_python) for name in PYTHONS)
    return made(*pythons, (NODE / "node_modules", NODE / "package-lock.json", build_node))


def made(*wanted: tuple[Path, Path, Builder]) -> int:
    """Create the missing environments of these folders, each from its lock. Return the exit code."""
    try:
        for target, lock, build in wanted:
            refreshed(target, lock, build)
    except InstallError as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    return 0


def environment(name: str) -> Path:
    """Return the folder of a Python environment."""
    return ROOT / f".venv-clients-{name}"


def installed(target: Path, lock: Path) -> bool:
    """Return whether `place` was created completely from this lock."""
    mark = target / MARK
    return mark.exists() and mark.read_text() == fingerprint(lock)


def fingerprint(lock: Path) -> str:
    """Return the inputs of an environment: the lock and, for its compiled packages, the interpreter."""
    return hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()


def refreshed(target: Path, lock: Path, build: Builder) -> None:
    """Create the environment again unless it is up to date. Raises InstallError."""
    if not installed(target, lock):
        print(f"Installing {target.relative_to(ROOT)} …", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        build(target, lock)
        (target / MARK).write_text(fingerprint(lock))


def build_python(target: Path, lock: Path) -> None:
    """Create a virtual environment with exactly the packages of the lock."""
    venv.create(target, with_pip=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(lock)], ROOT)


def build_node(target: Path, lock: Path) -> None:
    """Install the packages of package-lock.json without running their scripts."""
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm is not installed (Debian: npm)")
    run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], lock.parent)
    target.mkdir(exist_ok=True)


def run(command: list[str], folder: Path) -> None:
    """Run a command. Raises InstallError if it fails; its own output is on the terminal."""
    if subprocess.run(command, cwd=folder, check=False, env={**os.environ, "PIP_NO_INPUT": "1"}).returncode:
        raise InstallError(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
