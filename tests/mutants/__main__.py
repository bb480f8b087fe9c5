"""``python -m tests.mutants [MODULE …]``: try the mutants of these modules of the trusted core, or of all, and write docs/mutants.md."""

from __future__ import annotations

import sys

from tests.mutants.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
