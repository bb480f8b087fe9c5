"""``python -m tests.mutants [AREA … MODULE …]``: try the mutants of these areas and modules, or of all, and write docs/mutants.md."""

from __future__ import annotations

import sys

from tests.mutants.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
