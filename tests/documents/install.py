"""Owns the environment that builds the site, `.venv-docs`, made from docs/site.lock. Run by `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.clients.install import ROOT, build_python, installed, made

PLACE = ROOT / ".venv-docs"
LOCK = ROOT / "docs" / "site.lock"


def mkdocs() -> Path | None:
    """The program; None when it is not installed."""
    return PLACE / "bin" / "mkdocs" if installed(PLACE, LOCK) else None


def main() -> int:
    """Make the environment unless it is there. Returns the exit code."""
    return made((PLACE, LOCK, build_python))


if __name__ == "__main__":
    sys.exit(main())
