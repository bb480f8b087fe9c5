"""Runs the cases of a target, in this process or in two. A case has a number, so each difference can be repeated alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from time import monotonic
from typing import NamedTuple

from tests.fuzz.differential.cases import Difference, Target, seed
from tests.fuzz.differential.registry import TARGETS

PROCESSES = 2
_CASES_PER_CHECK = 64  # of the time
_SHOWN = 3000  # characters of a difference


class FirstCase(NamedTuple):
    """The first case of a kind of difference."""

    case: int
    seconds: float
    text: str


@dataclass
class Result:
    """The findings of a run: the number of cases, and by the first line of each kind of difference the number and the first one."""

    cases: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, FirstCase] = field(default_factory=dict)

    def add(self, case: int, seconds: float, error: Exception) -> None:
        text = f"{error}" if isinstance(error, Difference) else f"{type(error).__name__}: {error}"
        kind = text.partition("\n")[0]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.first.setdefault(kind, FirstCase(case, seconds, text[:_SHOWN]))

    def merge(self, other: Result) -> None:
        self.cases += other.cases
        self.seconds = max(self.seconds, other.seconds)
        for kind, number in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + number
            self.first[kind] = min(self.first.get(kind, other.first[kind]), other.first[kind])

    @property
    def differences(self) -> int:
        return sum(self.counts.values())


class Plan(NamedTuple):
    """The cases of one process: those with the numbers of ``numbers``, until ``seconds`` have passed."""

    target: str
    seed: int
    first: int
    step: int
    cases: int | None
    seconds: float | None

    def numbers(self) -> Iterator[int]:
        return islice(count(self.first, self.step), self.cases)


def run(plan: Plan, targets: Mapping[str, Target] = TARGETS) -> Result:
    """Run cases in this process."""
    result, random, started = Result(), Random(), monotonic()
    with targets[plan.target].opened() as case:
        for number in plan.numbers():
            random.seed(seed(plan.seed, number))
            try:
                case(random)
            except Exception as error:  # every failure is a finding, and the next case is independent of it
                result.add(number, monotonic() - started, error)
            result.cases += 1
            if plan.seconds is not None and result.cases % _CASES_PER_CHECK == 0 and monotonic() - started >= plan.seconds:
                break
    result.seconds = monotonic() - started
    return result


def run_in_processes(target: str, run_seed: int, *, cases: int | None = None, seconds: float | None = None) -> Result:
    """Run cases in several processes, which take every second number."""
    share = None if cases is None else -(-cases // PROCESSES)
    plans = [Plan(target, run_seed, first, PROCESSES, share, seconds) for first in range(PROCESSES)]
    merged = Result()
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(run, plans):
            merged.merge(result)
    return merged
