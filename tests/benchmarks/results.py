"""The measurements, as values and as `docs/performance/results.json`.

The rule: a section is one run of one case, with the machine and the versions that it ran with; a run replaces the sections of its
cases and leaves the others.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Values = Mapping[str, float]
"""Measured values by name; the unit is part of the name where it is not a count."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One value over all rounds."""

    median: float
    least: float
    most: float


@dataclass(slots=True)
class Row:
    """One proxy in one variant of a case: the values of every round, what went wrong, and notes for the reader."""

    proxy: str
    variant: str
    values: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, values: Values, faults: tuple[str, ...]) -> None:
        """Take a round."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)
        self.faults.extend(faults)

    def spread(self, name: str) -> Spread | None:
        """Return median, minimum and maximum of a value; None if it was not measured."""
        values = self.values.get(name)
        return Spread(statistics.median(values), min(values), max(values)) if values else None


@dataclass(slots=True)
class Section:
    """One run of one case. `others` is the share of the machine that what is not ours took meanwhile, from 0 to 1; `absent` has the
    proxies that were not measured, each with the reason.
    """

    case: str
    finished: str
    rounds: int
    seconds: float
    machine: dict[str, str]
    proxies: dict[str, str]
    others: float = 0.0
    absent: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def row(self, proxy: str, variant: str) -> Row:
        """A row, made if it is not there."""
        found = self.find(proxy, variant)
        if found is None:
            self.rows.append(found := Row(proxy, variant))
        return found

    def find(self, proxy: str, variant: str) -> Row | None:
        return next((row for row in self.rows if (row.proxy, row.variant) == (proxy, variant)), None)

    @property
    def variants(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(row.variant for row in self.rows))


def machine() -> dict[str, str]:
    """The machine and versions of a measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "CPU": model,
        "cores": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }


def read(path: Path) -> dict[str, Section]:
    """Read the sections of a file by case; empty without the file."""
    return {name: _section(data) for name, data in json.loads(path.read_text()).items()} if path.exists() else {}


def write(path: Path, sections: Mapping[str, Section]) -> None:
    """Replace a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({name: asdict(section) for name, section in sections.items()}, indent=1, sort_keys=True) + "\n")
    fresh.replace(path)


def _section(data: dict[str, Any]) -> Section:
    return Section(**{**data, "rows": [Row(**row) for row in data["rows"]]})
