"""The files of a release, built from this tree, and environments with only these: all without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.deploy.install import ROOT, tool
from tests.test_lock import entries

RUNTIME_LOCK = ROOT / "deploy" / "docker" / "runtime.lock"
_WHEELS = ("runtime-wheels", "build-wheels")


def offline() -> dict[str, str]:
    """The environment in which pip finds the locked packages and nothing else. Skips the test where they are not there."""
    found = [str(target) for name in _WHEELS if (target := tool(name)) is not None]
    if len(found) != len(_WHEELS):
        pytest.skip("the locked packages are not there (make deploy-tools)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join(found), "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return environment | own | {"PIP_NO_COMPILE": "1"}


def ran(*arguments: str | Path, folder: Path, environ: dict[str, str] | None = None, seconds: float = 300) -> str:
    """Return the output of a program that must succeed."""
    done = subprocess.run([*map(str, arguments)], cwd=folder, env=environ, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path, tree: Path = ROOT) -> tuple[Path, Path]:
    """The wheel and the source distribution of a tree."""
    ran(sys.executable, "-m", "hatchling", "build", "--directory", folder, folder=tree)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def locked_versions() -> dict[str, str]:
    """The version of each locked package."""
    return {name: match[0] for name, rest in entries(RUNTIME_LOCK) if (match := re.search(r"(?<===)[^\s;\\]+", rest))}


def environment(target: Path, release: Path) -> Path:
    """An environment in which a release was installed by its own metadata, with the lock as constraints; returns its programs' folder."""
    venv.create(target, with_pip=False)
    versions = target / "constraints.txt"  # pip takes no hashes for constraints where a requirement is not pinned
    locked = (line.rstrip(" \\") for line in RUNTIME_LOCK.read_text().splitlines() if "==" in line)
    versions.write_text("".join(f"{line}\n" for line in locked))
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", target / "bin" / "python"]
    ran(*pip, "install", "--quiet", "--constraint", versions, release, folder=target, environ=offline())
    ran(*pip, "check", folder=target, environ=offline())
    return target / "bin"
