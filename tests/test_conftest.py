"""The end of a run of the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_one(number):
    pytest.skip("no tool (make tool)")

def test_two():
    pytest.skip("no tool (make tool)")

@pytest.mark.skip(reason="not now")
def test_three(): ...
"""


def test_each_reason_of_skips_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPPED)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    environ = {name: value for name, value in os.environ.items() if name != "NOTHING_SKIPPED"}
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert [line for line in done.stdout.splitlines() if "SKIPPED" in line] == ["SKIPPED [4] no tool (make tool)", "SKIPPED [1] not now"]
