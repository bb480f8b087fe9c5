"""docs/compatibility.md names tests that exist, says truly what they run against, and leaves none of them out."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conformance.stage import REAL
from tests.support.rows import each_row

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "compatibility.md"
_NODE = re.compile(r"`(test_\w+)\.py::(test_\w+)`")
NOT_PROMISES = {"test_a_shape_finds_what_is_missing"}
NOT_OF_THE_DOCUMENTS = {"test_described"}
"""Modules that compare the gateway with its own reference."""


@dataclass(frozen=True, slots=True)
class Row:
    promise: str
    tests: list[tuple[str, str]]
    against: set[str]
    works: str

    def __str__(self) -> str:
        return self.promise[:60]


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "Promise":
            yield Row(cells[0], _NODE.findall(cells[2]), set(cells[3].split(", ")), cells[4])


ROWS = list(rows())


def module(name: str) -> ModuleType:
    return importlib.import_module(f"tests.conformance.{name}")


def stages(test: Callable[..., Any]) -> set[str]:
    """Return the server that a test runs against, as the page names it."""
    found = [mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize" and mark.args[0] == "stage"]
    each = (parameter for parameters in found for parameter in parameters)
    names = {parameter if isinstance(parameter, str) else parameter.values[0] for parameter in each} or {"simulator"}
    return {"real vLLM" if name in REAL else "simulator" for name in names}


@each_row("row", ROWS, ids=str)
def test_a_row_is_true(row: Row) -> None:
    assert row.tests and row.works in ("yes", "no")
    assert row.against == {name for file, test in row.tests for name in stages(getattr(module(file), test))}


def test_every_test_is_in_the_table() -> None:
    named = {node for row in ROWS for node in row.tests}
    modules = [path.stem for path in HERE.glob("test_*.py") if path != Path(__file__).resolve() and path.stem not in NOT_OF_THE_DOCUMENTS]
    there = {(name, test) for name in modules for test in vars(module(name)) if test.startswith("test_")}
    assert {node for node in there - named if node[1] not in NOT_PROMISES} == set()
