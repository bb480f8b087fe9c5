"""Makes the environment for fuzzing, ``.venv-fuzz``: atheris, and by a path the packages of ``.venv``, which has to be there."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from tests.clients.install import ROOT, build_python, made

FOLDER = ROOT / ".venv-fuzz"
LOCK = Path(__file__).resolve().parent / "requirements.lock"


def main() -> int:
    """Make it unless it is there. Returns the exit code."""
    return made((FOLDER, LOCK, _build))


def _build(folder: Path, lock: Path) -> None:
    build_python(folder, lock)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "project.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")


if __name__ == "__main__":
    sys.exit(main())
