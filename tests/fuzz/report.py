"""``make fuzz-full``: run the differential targets at full size and write docs/fuzzing.md from the measured figures.

The rule: every figure of the page comes from docs/fuzzing.json, which only a full run writes. The words are ``report.md``. Single targets
can be run; the figures of the others are retained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.fuzz.differential.__main__ import described
from tests.fuzz.differential.registry import TARGETS
from tests.fuzz.differential.run import run_in_processes

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("report.md")
PAGE, FIGURES = ROOT / "docs" / "fuzzing.md", ROOT / "docs" / "fuzzing.json"
NOTHING = "*not run*"


@dataclass(frozen=True, slots=True)
class Row:
    """The full run of one target."""

    seed: int
    cases: int
    seconds: int
    differences: int
    commit: str
    day: str


Rows = Mapping[str, Row]


def rendered(rows: Rows) -> str:
    """Render the page."""
    lines = ["| target | compares | cases | seed | differences | seconds | commit | on |", "|---|---|---|---|---|---|---|---|"]
    for name, target in TARGETS.items():
        row = rows.get(name)
        figures = [NOTHING, "", "", "", "", ""]
        if row is not None:
            figures = [f"{row.cases:,}", str(row.seed), f"{row.differences:,}", f"{row.seconds:,}", f"`{row.commit}`", row.day]
        lines.append(f"| `{name}` | {target.compares} | {' | '.join(figures)} |")
    return TEMPLATE.read_text().replace("{{TARGETS}}", "\n".join(lines))


def stored() -> Rows:
    """Return the figures of earlier runs."""
    return {name: Row(**row) for name, row in json.loads(FIGURES.read_text()).items()}


def _commit() -> str:
    """Return the short name of the commit; with a plus sign if files differ from it."""
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "gateway", "upstream", "tests"], cwd=ROOT, check=False).returncode
    return name + "+" * changed


def main() -> int:
    """Return the number of targets with differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS])
    parser.add_argument("--seed", type=int, default=2)
    chosen = parser.parse_args()
    rows, failed = dict(stored()), 0
    for name in chosen.targets or TARGETS:
        result = run_in_processes(name, chosen.seed, cases=TARGETS[name].cases)
        print(described(name, chosen.seed, result), flush=True)
        day = datetime.now(UTC).date().isoformat()
        rows[name] = Row(chosen.seed, result.cases, round(result.seconds), result.differences, _commit(), day)
        FIGURES.write_text(json.dumps({each: asdict(row) for each, row in rows.items()}, indent=2) + "\n")
        PAGE.write_text(rendered(rows))
        failed += bool(result.differences)
    return failed


if __name__ == "__main__":
    sys.exit(main())
