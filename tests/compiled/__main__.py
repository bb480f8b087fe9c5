"""Build the wheel with the compiled core, and run the tests of the data path with it.

The tests run in a copy of the project whose packages are the wheel's, so the extension modules never hide changed sources. Arguments are
pytest's; unless they name tests, those of the folders with compiled modules run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.clients.install import ROOT
from tests.compiled.install import COPY, FOLDER

WHEELS = ROOT / "build" / "wheels"
FOLDERS = (
    "gateway/admission",
    "gateway/auth",
    "gateway/client",
    "gateway/ledger",
    "gateway/limits",
    "gateway/proxy",
    "gateway/telemetry",
    "gateway/worker",
    "upstream/http",
)
_FOLDERS = ("compiled", "deploy", "docs", "tests")
TESTS = (*(f"tests/{each}" for each in FOLDERS), "tests/upstream/balancing", "tests/gateway/system/test_compiled_core.py")


def main(arguments: list[str]) -> int:
    """Return the exit code: of the build, or of the tests."""
    wheel = built()
    if wheel is None:
        return 1
    unpacked(wheel)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        f"cache_dir={ROOT / '.pytest_cache'}",
        *arguments,
        *([] if any(each.startswith("tests/") for each in arguments) else TESTS),
    ]
    return subprocess.run(command, cwd=COPY, env={**os.environ, "PYTHONPATH": str(COPY), "EXPECTED_CORE": "compiled"}).returncode


def built() -> Path | None:
    """Build the wheel. Returns its file, or None after an error, which was printed."""
    command = [str(FOLDER / "bin" / "python"), "-m", "hatchling", "build", "--target", "wheel", "--directory", str(WHEELS)]
    environ = {**os.environ, "HATCH_BUILD_HOOKS_ENABLE": "1", "PROFILE_WITH": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    return WHEELS / Path(done.stdout.split()[-1]).name if done.returncode == 0 else None  # its last line is the file


def unpacked(wheel: Path) -> None:
    """Make the copy: the packages of the wheel, the other folders, and links to files and environments.

    There are no links to folders that belong to the source distribution: hatchling visits each folder once, by any path.
    """
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(COPY)
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, COPY / name, symlinks=True, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    for each in ROOT.iterdir():
        if each.is_file() or each.name.startswith(".venv"):
            (COPY / each.name).symlink_to(each)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
