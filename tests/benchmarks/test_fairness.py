"""The benchmark of fairness runs, and weighs the service of each flow."""

from __future__ import annotations

import re
import subprocess
import sys
from random import Random

import pytest

from tests.benchmarks import goodput
from tests.benchmarks.fairness import COLUMNS, SCENARIOS, Options, Service, _relative, _service, queue_cost


def test_service_is_weighted_without_cached_tokens() -> None:
    rows = [("a", 0.0, 20, 16, 10, 500.0), ("a", 0.0, 5, None, None, None)]
    assert _service(rows, Options(1.0, 1, 2.0, 3.0)) == Service(2, 2.0 * 9 + 3.0 * 10, 10, [0.0, 0.5])


def test_one_is_a_fair_share() -> None:
    flows = SCENARIOS["weights"]
    run = [Service(1, 100.0, 1, ()), Service(1, 400.0, 1, ())]
    assert [_relative(flows, run, number) for number in (0, 1)] == [1, 1]


def test_the_queue_is_measured() -> None:
    assert 0 < queue_cost(20, 4) < 0.01


@pytest.mark.parametrize("generator", goodput.GENERATORS)
def test_a_generator_is_seeded_and_has_the_rate(generator: str) -> None:
    first, again = (list(goodput.GENERATORS[generator](Random(1), 50.0)) for _ in range(2))
    assert first == again and sum(map(len, first)) == pytest.approx(50.0 * goodput.SECONDS, rel=0.25)


@pytest.mark.parametrize("scenario", ["disconnects"])
def test_a_scenario_runs(scenario: str) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.fairness", scenario, "--seconds", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    columns, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert tuple(columns) == COLUMNS
    assert [row[1] for row in rows] == [flow.name for flow in SCENARIOS[scenario]]
    assert all(int(row[2]) > 0 and re.fullmatch(r"\d+, \d+", row[5]) for row in rows), printed
