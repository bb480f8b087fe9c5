"""Owns the environment that builds the site, `.venv-docs`, made from docs/site.lock. Run by `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.clients.install import ROOT, build_python, installed, made

FOLDER = ROOT / ".venv-docs"
LOCK = ROOT / "docs" / "site.lock"


def mkdocs() -> Path | None:
    """The program; None when it is not installed."""
    return FOLDER / "bin" / "mkdocs" if installed(FOLDER, LOCK) else None


def main() -> int:
    """Make the environment unless it is there. Returns the exit code."""
    return made((FOLDER, LOCK, build_python))


if __name__ == "__main__":
    sys.exit(main())
