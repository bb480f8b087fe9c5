"""``make accounting``: play 2,000 requests and faults through a gateway with two real vLLMs, and write the tables of docs/accounting.md.

With ``--simulated`` it plays 100,000 requests with two simulators and writes the table of docs/reliability-soak.md, as in ``make soak``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.accounting.scenarios import play, real_run, simulated_run
from tests.accounting.summary import BEGIN, END, Summary
from tests.faults.report import ROOT, machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the run and write its tables. Return 1 if a row or an engine's count is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="simulators in place of real vLLMs")
    parser.add_argument("--requests", type=int, help="2,000 by default, 100,000 with simulators")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--to", type=Path, help="the page with the markers of the tables")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accounting-") as folder:
        if options.simulated:
            page, requests, started, victims = "reliability-soak.md", 100_000, simulated_run(Path(folder), options.seed), ("", "", "")
        else:
            page, requests, victims = "accounting.md", 2_000, ("EngineCore", "", "EngineCore")
            started = real_run(Path(folder), options.seed)
        with started as (run, database):
            summary = play(run, database, options.requests or requests, victims)
    write(options.to or ROOT / "docs" / page, summary, time.monotonic() - began)
    for problem in summary.problems:
        print(problem, file=sys.stderr)
    return int(bool(summary.problems))


def write(page: Path, summary: Summary, seconds: float) -> None:
    """Write the tables between the markers of a page. ``seconds``: the duration of the run."""
    before, _, rest = page.read_text().partition(BEGIN)
    took = f"{machine()} The run took {seconds / 60:.1f} minutes."
    page.write_text("\n".join([f"{before}{BEGIN}", "", *summary.lines(), "", took, "", f"{END}{rest.partition(END)[2]}"]))


if __name__ == "__main__":
    sys.exit(main())
