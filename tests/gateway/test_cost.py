"""The cost of a request and a chunk. It is counted, not timed: every function call, and every step of the interpreter.

The exchange of ``tests.support.exchange`` runs in a separate process without pytest, which rewrites assertions; code in ``tests/`` is not
counted. So the counts are those of the program, and equal on every machine. Each bound was set to 10% above the count of that day.

``python -m tests.gateway.test_cost`` prints the counts. With the name of a row, it prints the counts by function.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, NamedTuple

import pytest

from gateway.ledger.journal import Journal
from gateway.snapshot.snapshot import Limits
from tests.support.exchange import CHUNKS, COUNTED_CHUNKS, OTHER_REQUEST, REQUEST, exchange

TIMES = 20
WARM_UP = 100


class Count(NamedTuple):
    """Per exchange: calls of Python functions, of C functions, and steps of the interpreter."""

    python: float
    c: float
    steps: float


BOUNDS = {
    "request": Count(115, 100, 3810),
    "request with another key": Count(126, 116, 4255),
    "request with a ledger": Count(124, 115, 4230),
    "request of a limited key": Count(152, 116, 5170),
    "request of a key with budgets": Count(174, 134, 6370),
    "chunk": Count(3.3, 11, 231),
    "chunk with exact counting": Count(3.3, 15.4, 270),
}
"""At most 10% above the counts with CPython 3.11. Steps are compared with that version only, because each version has its own byte code."""
IDENTITY = {"request with identity": "request", "request of a key in the store": "request", "chunk with identity": "chunk"}
"""Rows with everything of identity configured, and the rows without, of which they may cost 2% more."""


ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = str(ROOT / "tests")


def _of_program(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(TESTS)


def _function(frame: FrameType) -> str:
    path = PurePath(frame.f_code.co_filename)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else PurePath(*path.parts[-3:])
    return f"{shown}:{frame.f_code.co_firstlineno} {frame.f_code.co_qualname}"


def counted(work: Callable[[], None]) -> dict[str, Count]:
    """Count what one run of ``work`` takes, on average over TIMES, by function of the program."""
    for _ in range(WARM_UP):
        work()
    python, c, steps = Counter[str](), Counter[str](), Counter[str]()

    def on_call(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call") and _of_program(frame):
            (python if event == "call" else c)[_function(frame)] += 1

    def on_step(frame: FrameType, event: str, _: object) -> Any:
        if not _of_program(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps[_function(frame)] += event == "opcode"
        return on_step

    for install, watch in ((sys.setprofile, on_call), (sys.settrace, on_step)):
        install(watch)
        for _ in range(TIMES):
            work()
        install(None)
    return {name: Count(python[name] / TIMES, c[name] / TIMES, steps[name] / TIMES) for name in python | c | steps}


async def count(row: str) -> dict[str, Count]:
    """Count a row of BOUNDS or IDENTITY, by function."""
    with closing(Journal.create("cost")) as journal:
        async with exchange() as one:
            if row in IDENTITY:
                one.identify(in_store=row == "request of a key in the store")
            if row in ("chunk", "chunk with identity"):
                one.stream()
            if row in ("request with a ledger", "chunk with exact counting"):
                one.record(journal)
            if row == "request of a limited key":
                one.limit(Limits(requests_per_minute=6000, tokens_per_minute=10**6, concurrent=100))
            if row == "request of a key with budgets":
                one.limit(Limits(6000, 10**6, tokens_per_day=10**9, tokens_per_month=10**9, concurrent=100))
            if row == "request with another key":
                return counted(partial(one.serve_another, cycle((REQUEST, OTHER_REQUEST))))
            if row == "chunk with exact counting":
                one.stream(COUNTED_CHUNKS)
            received = {"chunk": CHUNKS, "chunk with identity": CHUNKS, "chunk with exact counting": COUNTED_CHUNKS}.get(row)
            return counted(one.serve if received is None else partial(one.receive, cycle(zip(received, CHUNKS, strict=True))))


def total(functions: Mapping[str, Count]) -> Count:
    """Add up the counts of functions."""
    python, c, steps = (round(sum(numbers), 2) for numbers in zip(*functions.values(), strict=True))
    return Count(python, c, steps)


@pytest.fixture(scope="module")
def counts() -> dict[str, Count]:
    """The counts of all rows, from a process without pytest."""
    command = [sys.executable, "-m", "tests.gateway.test_cost"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = (line.partition(": ") for line in result.stdout.splitlines())
    return {row: Count(*map(float, re.findall(r"[\d.]+", numbers))) for row, _, numbers in lines}


@pytest.mark.parametrize("row", BOUNDS)
def test_the_path_is_within_its_bounds(counts: dict[str, Count], row: str) -> None:
    bound, now = BOUNDS[row], counts[row]
    compared = Count._fields if sys.version_info[:2] == (3, 11) else Count._fields[:2]
    longer = [f"{name}: {getattr(now, name)} > {getattr(bound, name)}" for name in compared if getattr(now, name) > getattr(bound, name)]
    assert not longer, (
        f"a {row} costs more than its bound: {', '.join(longer)}\n"
        f'To see which functions it is spent in, run: python -m tests.gateway.test_cost "{row}" (before and after the change).\n'
        "Shorten the path. Raise a bound only for a feature that every such request needs: to 10% above the new count, with the feature\n"
        "and both counts in the commit message."
    )


@pytest.mark.parametrize("row", IDENTITY)
def test_identity_costs_at_most_2_percent(counts: dict[str, Count], row: str) -> None:
    """Function calls are counted together, because a single one is more than 2% of them for a chunk."""
    without, now = counts[IDENTITY[row]], counts[row]
    assert without.steps > 0
    assert now.steps <= 1.02 * without.steps, f"{row}: {now.steps} steps instead of {without.steps}"
    assert now.python + now.c <= 1.02 * (without.python + without.c), f"{row}: {now} instead of {without}"


def main(rows: Sequence[str]) -> None:
    """Print the counts of all rows, or the functions behind those of one row."""
    for row in rows or (*BOUNDS, *IDENTITY):
        functions = asyncio.run(count(row))
        if rows:
            for name, each in sorted(functions.items(), key=lambda item: -item[1].steps):
                print(f"{each.python:8.2f} {each.c:8.2f} {each.steps:9.2f}  {name}")
        now = total(functions)
        print(f"{row}: {now.python} calls of Python, {now.c} of C, {now.steps} steps")


if __name__ == "__main__":
    main(sys.argv[1:])
