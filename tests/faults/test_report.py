"""The page that ``make faults`` writes, and a short soak."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import report, soak
from tests.faults.conftest import FULL
from tests.faults.rows import ROWS


def test_every_row_is_in_the_page_with_or_without_a_figure(tmp_path: Path) -> None:
    given, page = tmp_path / "figures.json", tmp_path / "page.md"
    given.write_text(json.dumps({"2": ["one | two", "three"], "33": ["five"]}))
    assert report.main(["--from", str(given), "--to", str(page)]) == 0
    given.write_text(json.dumps({"33": ["four"]}))
    assert report.main(["--from", str(given), "--to", str(page)]) == 0, "the figures of other rows stay"
    lines = [line for line in page.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [int(line.split("|")[1]) for line in lines] == list(ROWS) == list(range(1, 37))
    assert "| one \\| two<br>three | 20" in lines[1] and "| four | 20" in lines[32]
    assert sum(report.NOTHING in line for line in lines) == 34


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
    slopes = ", ".join(f"{name} {findings.slope(name):+.2f} MiB/min" for name in findings.samples)
    measured(f"{seconds} s, {findings.sent:,} requests, {findings.recorded:,} records, at the end no request in flight and no additional "
             f"descriptor; memory {slopes}")  # fmt: skip
    assert findings.unmet == []
    assert set(findings.samples) == {"control", "worker 0", "worker 1"}
    assert findings.outcomes["200"] and findings.outcomes["stream"] and findings.outcomes["left"]
    page = soak.rendered(findings)
    assert f"{findings.sent:,} requests sent" in page and "| worker 1 |" in page


def test_a_soak_reports_a_missed_requirement() -> None:
    """Each requirement is missed alone, and a good soak misses none."""
    assert _found().unmet == []
    for message, findings in {
        "a worker grew by 2.0 MiB/min, and 1.0 may be": _found(grows=2 << 20),
        "a worker has 23 descriptors, and had 22 at first": _found(fds=23),
        "94 requests are recorded, of 100 that were sent and 5 whose clients left": _found(recorded=94),
        "101 requests are recorded, of 100 that were sent and 5 whose clients left": _found(recorded=101),
        "in flight: 1": _found(left="in flight: 1"),
    }.items():
        assert findings.unmet == [message] and f"- **Missed:** {message}.\n" in soak.rendered(findings)


def _found(*, grows: int = 0, fds: int = 22, recorded: int = 95, left: str = "") -> soak.Findings:
    """Return a soak of ten minutes. Its process grows by ``grows`` bytes per minute and has ``fds`` descriptors at the end."""
    samples = [soak.Sample(60.0 * minute, grows * minute, 22) for minute in range(11)] + [soak.Sample(601.0, 0, fds)]
    return soak.Findings(600.0, Counter({"left": 5}), {"a worker": samples}, left, 100, recorded)
