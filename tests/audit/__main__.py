"""``make audit``: every package that is installed, deployed, or builds the documents, against the advisories of PyPI.

The locks name these packages; pip-audit asks, in a separate environment. It needs PyPI's own service (a mirror has no
advisories), so it is no part of the suite. A package that cannot be looked up is a failure, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.clients.install import ROOT, InstallError, build_python, refreshed

FOLDER = ROOT / ".venv-audit"
LOCK = Path(__file__).resolve().parent / "requirements.lock"
LOCKS = (
    ROOT / "requirements.lock",
    LOCK,
    *(lock for folder in ("deploy", "docs", "tests/fuzz") for lock in sorted((ROOT / folder).rglob("*.lock"))),
)


def main() -> int:
    """Returns the exit code."""
    try:
        refreshed(FOLDER, LOCK, build_python)
    except InstallError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1
    audit = [str(FOLDER / "bin" / "pip-audit"), "--strict", "--disable-pip", "--require-hashes", "--progress-spinner=off"]
    return max(subprocess.run([*audit, "--requirement", str(lock)], check=False).returncode for lock in LOCKS)


if __name__ == "__main__":
    sys.exit(main())
