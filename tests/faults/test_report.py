"""The page that ``make faults`` writes, and a short soak."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import report, soak
from tests.faults.conftest import FULL
from tests.faults.rows import ROWS


def test_every_row_is_there_and_one_without_a_figure_says_so(tmp_path: Path) -> None:
    given, page = tmp_path / "figures.json", tmp_path / "page.md"
    given.write_text(json.dumps({"2": ["one | two", "three"], "33": ["five"]}))
    assert report.main(["--from", str(given), "--to", str(page)]) == 0
    given.write_text(json.dumps({"33": ["four"]}))
    assert report.main(["--from", str(given), "--to", str(page)]) == 0, "the figures of other rows stay"
    lines = [line for line in page.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(line.split("|")[1]) for line in lines] == list(ROWS) == list(range(1, 34))
    assert "| one \\| two<br>three | 20" in lines[1] and "| four | 20" in lines[32]
    assert sum(report.NOTHING in line for line in lines) == 31


def test_every_row_that_a_test_names_exists() -> None:
    named = {
        int(number) for path in Path(__file__).parent.glob("test_*.py") for number in re.findall(r"mark\.row\((\d+)\)", path.read_text())
    }
    assert named <= set(ROWS)


def test_a_slope() -> None:
    assert soak.slope([(0, 5), (1, 7), (2, 9)]) == 2
    assert soak.slope([(0, 5), (1, 7), (2, 5)]) == 0 == soak.slope([(1, 1)]) == soak.slope([])


@pytest.mark.row(33)
@pytest.mark.timeout(1200)
def test_a_soak(tmp_path: Path, measured: Callable[[str], None]) -> None:
    seconds = 600 if FULL else 5
    findings = soak.soak(seconds, tmp_path)
    unheard = findings.outcomes["left"]  # a request may have been on its way when its client reset the connection
    assert findings.left == 0 and findings.sent - unheard <= findings.recorded <= findings.sent
    assert set(findings.looks) == {"control", "relay 0", "relay 1"}
    assert findings.outcomes["200"] and findings.outcomes["stream"] and findings.outcomes["left"]
    for name, looks in findings.looks.items():
        assert looks[-1].fds <= looks[0].fds + 2 * soak.CLIENTS, f"{name} keeps descriptors"
    page = soak.rendered(findings)
    assert f"{findings.sent:,} requests sent" in page and "| relay 1 |" in page
    slopes = ", ".join(f"{name} {findings.slope(name):+.1f} MiB/h" for name in findings.looks)
    measured(f"{seconds} s, {findings.sent:,} requests, {findings.recorded:,} records, 0 in flight at the end; memory {slopes}")
