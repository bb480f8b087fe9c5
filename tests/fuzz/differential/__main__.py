"""``python -m tests.fuzz.differential [TARGET …]``: run targets for ``--seconds`` each, or ``--cases``; ``--first`` repeats one case."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.differential.registry import TARGETS
from tests.fuzz.differential.run import Plan, Result, run, run_in_processes


def main() -> int:
    """Return the number of targets with differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"some of: {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="for each target")
    parser.add_argument("--cases", type=int, help="for each target; without --seconds, its full number")
    parser.add_argument("--first", type=int, help="run the case with this number alone, in this process")
    chosen = parser.parse_args()
    failed = 0
    for name in chosen.targets or TARGETS:
        if chosen.first is not None:
            result = run(Plan(name, chosen.seed, chosen.first, 1, 1, None))
        else:
            cases = TARGETS[name].cases if chosen.cases is None and chosen.seconds is None else chosen.cases
            result = run_in_processes(name, chosen.seed, cases=cases, seconds=chosen.seconds)
        print(described(name, chosen.seed, result), flush=True)
        failed += bool(result.differences)
    return failed


def described(name: str, seed: int, result: Result) -> str:
    """Return a result as lines: the counts, then the first difference of each kind with the command that repeats it."""
    rate = result.cases / max(result.seconds, 0.001)
    lines = [f"{name}: {result.cases} cases in {result.seconds:.0f} s, {rate:.0f} a second, {result.differences} differences"]
    for kind, found in sorted(result.first.items(), key=lambda row: row[1].case):
        lines += [
            f"{result.counts[kind]} × {found.text}",
            f"  the first after {found.seconds:.1f} s; repeat: python -m tests.fuzz.differential {name} --seed {seed} --first {found.case}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
