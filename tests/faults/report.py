"""``make faults``: runs the matrix of faults at its whole size and writes docs/reliability.md from what the tests measured.

The rule: a figure in the report is one that a test left in this very run; a row without one says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGINNING = """\
# Reliability

What is done to the gateway, what has to hold then, and what was measured. `make faults` provokes each fault at its whole size and
writes this page; `make test` provokes them at a size that an ordinary run can bear. After every fault three things are checked as well:
whatever was begun was finished and recorded, once; nothing is in flight; no task, connection or descriptor is left.
"""
NOTHING = "*not measured in this run*"


def rendered(measured: Mapping[str, Sequence[str]], where: str) -> str:
    """The page. ``measured``: by a row's number, what its tests have left; ``where``: what it was measured on."""
    lines = ["| # | fault | expected | measured |", "|---|---|---|---|"]
    for number, row in ROWS.items():
        figures = "<br>".join(_cell(text) for text in measured.get(str(number), ())) or NOTHING
        lines.append(f"| {number} | {_cell(row.fault)} | {_cell(row.expected)} | {figures} |")
    return "\n".join([BEGINNING, where, "", *lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def machine() -> str:
    """What this is measured on, without its name."""
    return f"Measured on {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, write the page; returns pytest's status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="given", type=Path, help="figures that a run has left, instead of a run")
    parser.add_argument("--to", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("words", nargs="*", help="for pytest")
    options = parser.parse_args(arguments)
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        figures = options.given or Path(folder) / "figures.json"
        if options.given is None:
            environ = {**os.environ, "FAULTS_FULL": "1", "FAULTS_REPORT": str(figures)}
            status = subprocess.run([sys.executable, "-m", "pytest", "-m", "row", *options.words], cwd=ROOT, env=environ).returncode
        options.to.write_text(rendered(json.loads(figures.read_text()), machine()))
    return status


if __name__ == "__main__":
    sys.exit(main())
