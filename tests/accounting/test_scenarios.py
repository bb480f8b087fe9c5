"""A small run against simulators, with all faults, has no wrong row and no difference, and its tables are written to a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accounting.__main__ import write
from tests.accounting.scenarios import play, simulated_run
from tests.accounting.summary import BEGIN, END
from tests.support import postgres

REQUESTS = 300


@pytest.mark.skipif(not postgres.installed(), reason=postgres.NOT_INSTALLED)
def test_a_small_run_has_no_difference(tmp_path: Path) -> None:
    with simulated_run(tmp_path, seed=7) as (run, database):
        summary = play(run, database, REQUESTS, ("", "", ""))
    assert summary.problems == []
    assert abs(len(summary.verdicts) - REQUESTS) < 10
    assert {engine.name for engine in summary.engines} == {"sim/killed#0", "sim/spared#0"}
    page = tmp_path / "page.md"
    page.write_text(f"Before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, summary, 90.0)
    text = page.read_text()
    assert text.startswith("Before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "The run took 1.5 minutes." in text and text.count("| sim/spared#0 |") == 4
