"""Tries the mutants of the areas, and writes docs/mutants.md.

The rule: the figures of the page come from docs/mutants.json, which is written after each module. Single areas or modules can be tried; the
figures of the others are retained.
"""

from __future__ import annotations

import ast
import html
import json
import multiprocessing
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from tests.mutants.areas import AREAS
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.lua import lua_mutants
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.trial import ROOT, Outcome, tried

TEMPLATE = Path(__file__).with_name("report.md")
PAGE, FIGURES = ROOT / "docs" / "mutants.md", ROOT / "docs" / "mutants.json"
SEED = 1
PROCESSES = 2
_LONGEST = 600.0  # CPU seconds of the tests of an unchanged module
_SLOWER, _LEAST_TIMEOUT = 2, 5.0
"""A trial may take this many times the CPU seconds of the unchanged module, and at least so many."""

Row = Mapping[str, Any]
Figures = Mapping[str, Mapping[str, Row]]
"""By area, then by module."""


class _Trial(NamedTuple):
    """A mutant, by its number among those of its module: a tree is not sent to another process."""

    area: str
    module: str
    number: int
    timeout: float


@cache
def mutants_of(area: str, module: str) -> list[Mutant]:
    """Return the mutants of a module that belong to an area."""
    source = (ROOT / module).read_text()
    return list(mutants(source, AREAS[area].modules[module].only) if module.endswith(".py") else lua_mutants(source))


@cache
def _sample(area: str) -> frozenset[tuple[str, int]]:
    """Return the mutants of an area that are tried: all, or as many as it allows."""
    numbers = [(module, number) for module in AREAS[area].modules for number in range(len(mutants_of(area, module)))]
    return frozenset(numbers if len(numbers) <= AREAS[area].most else Random(SEED).sample(numbers, AREAS[area].most))


def run(area: str, module: str, processes: int, former: Row | None = None) -> Row:
    """Try the mutants of a module. ``former``: figures of the same source, of which only the survivors are tried again.

    Raises RuntimeError if the tests of the module fail without a change.
    """
    found, started = mutants_of(area, module), monotonic()
    numbers = sorted(number for name, number in _sample(area) if name == module)
    survived = None if former is None else {tuple(each) for each in former["survivors"]}
    again = [number for number in numbers if survived is None or tuple(found[number][:4]) in survived]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        timeout = pool.submit(_timeout, area, module).result()
        outcomes = dict(zip(again, pool.map(_outcome, [_Trial(area, module, number, timeout) for number in again]), strict=True))
    print(f"{module}: {len(again)} mutants in {monotonic() - started:.0f} s", flush=True)
    survivors = [list(found[number][:4]) for number in again if not outcomes[number].killed]
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    return {
        "mutants": len(found),
        "tried": len(numbers),
        "killed": len(numbers) - len(survivors),
        "survivors": survivors,
        "day": datetime.now(UTC).date().isoformat(),
        "commit": _commit(module),
        "source": _digest(module),
        "seconds": round(seconds + (former["seconds"] if former is not None else 0)),
    }


def _digest(module: str) -> str:
    return sha256((ROOT / module).read_bytes()).hexdigest()[:12]


def is_current(module: str, row: Row) -> bool:
    """Return whether figures are those of the module as it is now. Figures without a digest count as current."""
    return bool(row.get("source", _digest(module)) == _digest(module))


def _commit(module: str) -> str:
    """Return the last commit that changed a module."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=8", "--", module]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _timeout(area: str, module: str) -> float:
    """Return the CPU seconds that a trial of a module may take."""
    source, tests = (ROOT / module).read_text(), AREAS[area].modules[module].tests
    outcome = tried(module, ast.parse(source) if module.endswith(".py") else source, tests, _LONGEST)
    if outcome.killed:
        raise RuntimeError(f"the tests of {module} fail without a change: {' '.join(tests)}")
    return max(_SLOWER * outcome.seconds, _LEAST_TIMEOUT)


def _outcome(trial: _Trial) -> Outcome:
    area, module, number, timeout = trial
    return tried(module, mutants_of(area, module)[number].changed, AREAS[area].modules[module].tests, timeout)


def rendered(figures: Figures) -> str:
    """Render the page."""
    survivors = ["| area | module | line | definition | before | after | why no test can notice it |", "|---|---|---|---|---|---|---|"]
    for area, modules in figures.items():
        for module, row in modules.items():
            for line, where, before, after in row["survivors"]:
                reason = EQUIVALENT.get(module, {}).get((where, before, after), "**a test is missing**")
                cells = (area, Path(module).name, line, _code(where), _code(before), _code(after), reason)
                survivors.append(f"| {' | '.join(map(str, cells))} |")
    text = TEMPLATE.read_text().replace("{{AREAS}}", "\n".join(_areas(figures))).replace("{{COUNTS}}", "\n".join(_counts(figures)))
    return text.replace("{{SURVIVORS}}", "\n".join(survivors) if len(survivors) > 2 else "None.")


_COLUMNS = "mutants | tried | noticed | equivalent | noticed of the others | CPU seconds"


def _areas(figures: Figures) -> list[str]:
    """Return the table of the areas."""
    rows = [f"| area | {_COLUMNS} |", "|---|---|---|---|---|---|---|"]
    return rows + [f"| {area.title} | {_count(figures[name])} |" for name, area in AREAS.items() if name in figures]


def _counts(figures: Figures) -> list[str]:
    """Return the table of the modules."""
    rows = [f"| area | module | {_COLUMNS} | commit | on |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name, area in AREAS.items():
        for module in area.modules:
            row = figures.get(name, {}).get(module)
            counted = "*not run* | | | | | | | " if row is None else f"{_count({module: row})} | {row['commit']} | {row['day']}"
            rows.append(f"| {name} | [{module}](../{module}) | {counted} |")
    return rows


def _count(modules: Mapping[str, Row]) -> str:
    found, attempts, killed, seconds = (sum(row[name] for row in modules.values()) for name in ("mutants", "tried", "killed", "seconds"))
    equal = sum(tuple(each[1:]) in EQUIVALENT.get(module, {}) for module, row in modules.items() for each in row["survivors"])
    share, used = f"{killed / max(attempts - equal, 1):.1%}", f"{seconds:,}" if seconds else ""
    return f"{found:,} | {attempts:,} | {killed:,} ({killed / max(attempts, 1):.1%}) | {equal:,} | {share} | {used}"


def _code(text: str) -> str:
    """Return source for a cell of a table."""
    return f"<code>{html.escape(text).replace('|', '&#124;').replace('*', '&#42;').replace('_', '&#95;')}</code>"


def stored() -> Figures:
    """Return the figures of earlier runs."""
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def _store(figures: Figures) -> None:
    ordered = {
        name: {module: figures[name][module] for module in area.modules if module in figures.get(name, {})} for name, area in AREAS.items()
    }
    FIGURES.write_text(json.dumps({name: rows for name, rows in ordered.items() if rows}, indent=1) + "\n")
    PAGE.write_text(rendered(stored()))


def _selected(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return areas and modules by their names. Raises ValueError for an unknown name."""
    pairs = [(area, module) for area in AREAS for module in AREAS[area].modules]
    for name in names:
        if not any(name in pair for pair in pairs):
            raise ValueError(f"{name} is neither an area nor a module of one: {', '.join(AREAS)}")
    return [pair for pair in pairs if not names or any(name in pair for name in names)]


def main(arguments: Sequence[str]) -> int:
    """Try the mutants of some areas or modules, or of all, and write the page."""
    parser = ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="areas, or modules of them")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--survivors", action="store_true", help="only the stored survivors of unchanged modules, after a new test")
    options = parser.parse_args(arguments)
    for area, module in _selected(options.names):
        former = stored().get(area, {}).get(module) if options.survivors else None
        if former is not None and not is_current(module, former):
            raise ValueError(f"{module} has changed: try all of its mutants")
        row = run(area, module, options.processes, former)
        figures = stored()  # again: another process may have written the figures of other modules
        _store({**figures, area: {**figures.get(area, {}), module: row}})
    print("\n".join(_areas(stored())))
    return 0
