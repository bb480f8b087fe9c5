"""``python -m tests.attacks`` writes the pages about attacks. With ``run`` it runs all attacks of the table, and nothing else."""

from __future__ import annotations

import subprocess
import sys

from tests.attacks.page import DOCS, ROOT, rendered
from tests.attacks.table import ATTACKS


def main(arguments: list[str]) -> int:
    """Write the pages, or run the attacks. Returns the exit status."""
    if arguments != ["run"]:
        for name, text in rendered().items():
            (DOCS / name).write_text(text)
        return 0
    nodes = [attack.node for attacks in ATTACKS.values() for attack in attacks]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *nodes], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
