"""Owns ``.venv-compiled``, which builds the compiled core, made from compiled/requirements.lock. Run by ``make compiled``."""

from __future__ import annotations

import sys

from tests.clients.install import ROOT, build_python, made

FOLDER = ROOT / ".venv-compiled"
LOCK = ROOT / "compiled" / "requirements.lock"
COPY = ROOT / "build" / "compiled"
"""The copy of the project with the compiled core that `make compiled` tests, and `make bench` measures."""


def main() -> int:
    """Create the environment unless it is there. Return the exit code."""
    return made((FOLDER, LOCK, build_python))


if __name__ == "__main__":
    sys.exit(main())
