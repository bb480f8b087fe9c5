"""The benchmark of concurrency limits runs, and has a row for each value."""

from __future__ import annotations

import re
import subprocess
import sys


def test_a_fixed_value_and_the_automatic_limit_are_compared() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.concurrency", "--seconds", "2", "--warm-up", "1", "--fixed", "24"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    _, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows] == ["24", "auto"], printed
    assert all(int(row[1]) > 0 and re.fullmatch(r"\d+, \d+", row[5]) for row in rows), printed
