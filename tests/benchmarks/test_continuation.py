"""The benchmark of continuable streams runs, and prints each figure."""

from __future__ import annotations

import re
import subprocess
import sys


def test_both_models_and_the_gap_are_measured() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.continuation", "--pairs", "1", "--streams", "2", "--losses", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows if re.fullmatch(r"-?[\d.]+", row[1])] == [
        "exact",
        "off",
        "median of the pairs' ratios",
        "first event of an undisturbed stream",
        "next event after a loss",
    ], printed
    assert re.search(r"Memory of a record: [678]\.\d bytes a token", printed), printed
