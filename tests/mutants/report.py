"""Tries the mutants of the trusted core, in two processes, and writes docs/mutants.md.

The rule: the figures of the page come from docs/mutants.json. Single modules can be tried; the figures of the others are retained.
"""

from __future__ import annotations

import ast
import html
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from tests.mutants.core import CORE
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.trial import ROOT, tried

TEMPLATE = Path(__file__).with_name("report.md")
PAGE, FIGURES = ROOT / "docs" / "mutants.md", ROOT / "docs" / "mutants.json"
MOST = 600
"""Mutants of one run. Of more, a sample is tried."""
SEED = 1
PROCESSES = 2
_LONGEST = 600.0  # CPU seconds of the tests of an unchanged module
_SLOWER, _LEAST_TIMEOUT = 2, 5.0
"""A trial may take this many times the CPU seconds of the unchanged module, and at least so many."""

Figures = Mapping[str, Mapping[str, Any]]


class _Trial(NamedTuple):
    """A mutant, by its number among those of its module: a tree is not sent to another process."""

    module: str
    number: int
    timeout: float


def run(modules: Sequence[str]) -> Figures:
    """Try the mutants of these modules. Raises RuntimeError if the tests of one fail without a change."""
    found = {module: _mutants_of(module) for module in modules}
    numbers = [(module, number) for module in modules for number in range(len(found[module]))]
    if len(numbers) > MOST:
        numbers = sorted(Random(SEED).sample(numbers, MOST), key=lambda row: (modules.index(row[0]), row[1]))
    started = monotonic()
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        timeouts = dict(zip(modules, pool.map(_timeout, modules), strict=True))
        trials = [_Trial(module, number, timeouts[module]) for module, number in numbers]
        killed = dict(zip(numbers, pool.map(_is_killed, trials), strict=True))
    print(f"{len(trials)} mutants in {monotonic() - started:.0f} s", flush=True)
    day = datetime.now(UTC).date().isoformat()
    return {
        module: {
            "mutants": len(found[module]),
            "tried": len(rows := [row for row in numbers if row[0] == module]),
            "killed": sum(killed[row] for row in rows),
            "survivors": [list(found[module][number][:4]) for _, number in rows if not killed[module, number]],
            "day": day,
        }
        for module in modules
    }


def _timeout(module: str) -> float:
    """Return the CPU seconds that a trial of a module may take."""
    outcome = tried(module, ast.parse((ROOT / module).read_text()), CORE[module].tests, _LONGEST)
    if outcome.killed:
        raise RuntimeError(f"the tests of {module} fail without a change: {' '.join(CORE[module].tests)}")
    return max(_SLOWER * outcome.seconds, _LEAST_TIMEOUT)


@cache
def _mutants_of(module: str) -> list[Mutant]:
    return list(mutants((ROOT / module).read_text(), CORE[module].only))


def _is_killed(trial: _Trial) -> bool:
    return tried(trial.module, _mutants_of(trial.module)[trial.number].tree, CORE[trial.module].tests, trial.timeout).killed


def rendered(figures: Figures) -> str:
    """Render the page."""
    survivors = ["| module | line | definition | before | after | why no test can notice it |", "|---|---|---|---|---|---|"]
    for module, row in figures.items():
        for line, where, before, after in row["survivors"]:
            reason = EQUIVALENT.get(module, {}).get((where, before, after), "**a test is missing**")
            survivors.append(f"| {Path(module).name} | {line} | {_code(where)} | {_code(before)} | {_code(after)} | {reason} |")
    text = TEMPLATE.read_text().replace("{{COUNTS}}", "\n".join(_counts(figures)))
    return text.replace("{{SURVIVORS}}", "\n".join(survivors) if len(survivors) > 2 else "None.")


def _counts(figures: Figures) -> list[str]:
    """Return the table of the modules, and of all together."""
    rows = ["| module | mutants | tried | noticed | equivalent | noticed of the others | on |", "|---|---|---|---|---|---|---|"]
    for module in CORE:
        link = f"[{module}](../{module})"
        if module in figures:
            rows.append(_count(link, {module: figures[module]}, figures[module]["day"]))
        else:
            rows.append(f"| {link} | *not run* | | | | | |")
    return [*rows, _count("all", figures, "")]


def _count(title: str, figures: Figures, day: str) -> str:
    found, attempts, killed = (sum(row[name] for row in figures.values()) for name in ("mutants", "tried", "killed"))
    equal = sum(tuple(each[1:]) in EQUIVALENT.get(module, {}) for module, row in figures.items() for each in row["survivors"])
    share = f"{killed / max(attempts - equal, 1):.1%}"
    return f"| {title} | {found:,} | {attempts:,} | {killed:,} ({killed / max(attempts, 1):.1%}) | {equal:,} | {share} | {day} |"


def _code(text: str) -> str:
    """Return source for a cell of a table."""
    return f"<code>{html.escape(text).replace('|', '&#124;').replace('*', '&#42;').replace('_', '&#95;')}</code>"


def stored() -> Figures:
    """Return the figures of earlier runs."""
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def main(modules: Sequence[str]) -> int:
    """Try the mutants of some modules, or of all, and write the page."""
    figures = {**stored(), **run(modules or list(CORE))}
    FIGURES.write_text(json.dumps({module: figures[module] for module in CORE if module in figures}, indent=1) + "\n")
    PAGE.write_text(rendered(figures))
    print("\n".join(_counts(figures)))
    return 0
