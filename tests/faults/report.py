"""``make faults``: run the fault matrix at full size and write docs/reliability.md from the measured figures.

The rule: every figure in the report was measured by a test, on the day in the same row. A row without a figure says so. The whole
matrix takes an hour, so single rows can be run. The figures of the other rows are retained.
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
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
INTRODUCTION = """\
# Reliability

This page lets you check which faults the gateway was tested with, the expected results, and the measured ones.

`make faults` injects each fault at full size and writes this page. `make test` injects them at a reduced size. After every fault three
conditions are checked as well: every started request was finished and recorded once; no request is in flight; no task, connection or
descriptor is left.
[A soak](reliability-soak.md) mixes all faults for ten minutes.
"""
NOTHING = "*not measured*"

Figures = Mapping[str, Mapping[str, Sequence[str] | str]]
"""By row number: ``figures``, as its tests measured them, and ``day``, the date of the measurement."""


def rendered(measured: Figures, where: str) -> str:
    """Render the page. ``where`` describes the machine of the measurements."""
    lines = ["| # | fault | expected | measured | on |", "|---|---|---|---|---|"]
    for number, row in ROWS.items():
        found = measured.get(str(number), {})
        figures = "<br>".join(_cell(text) for text in found.get("figures", ())) or NOTHING
        lines.append(f"| {number} | {_cell(row.fault)} | {_cell(row.expected)} | {figures} | {found.get('day', '')} |")
    return "\n".join([INTRODUCTION, where, "", *lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def machine() -> str:
    """Describe this machine, without its name."""
    return f"Measured on {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, write the page, and return the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="given", type=Path, help="figures that a run has left, instead of a run")
    parser.add_argument("--to", type=Path, default=PAGE, help="the page to write; its figures are kept beside it, as .json")
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS), metavar="N", help="these alone; all by default")
    options = parser.parse_args(arguments)
    status, stored = 0, options.to.with_suffix(".json")
    before: Figures = json.loads(stored.read_text()) if stored.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        figures = options.given or Path(folder) / "figures.json"
        if options.given is None:
            rows = " ".join(map(str, options.rows))
            environ = {**os.environ, "FAULTS_FULL": "1", "FAULTS_ROWS": rows, "FAULTS_REPORT": str(figures)}
            status = subprocess.run([sys.executable, "-m", "pytest", "-m", "row"], cwd=ROOT, env=environ).returncode
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        found = {**before, **{row: {"figures": left, "day": day} for row, left in json.loads(figures.read_text()).items()}}
    stored.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    options.to.write_text(rendered(found, machine()))
    return status


if __name__ == "__main__":
    sys.exit(main())
