"""The classes of the reconciliation: what they are for known requests, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger.engine_samples import EngineSample
from gateway.usage.reconciliation import (
    QUIET_WITHIN,
    Classes,
    Growth,
    LedgerSums,
    ReconciledServer,
    ReconciledWindow,
    RowSums,
    classify,
    gaps,
    unbilled,
    windows,
)

ZERO = EngineSample("one", "tiny", 1000, 1.0, True, 0, 0, 0, 0, 0)


class End(Enum):
    """How a request ended."""

    COMPLETE = auto()
    ABORTED = auto()
    """Its client disconnected, and the engine had not finished it."""
    FINISHED = auto()
    """Its client disconnected, and the engine had finished it."""
    PREFILL = auto()
    """Its client disconnected before the first event, and the engine had computed the prompt."""
    LOST = auto()
    DIRECT = auto()
    """It did not come through the gateway."""


@dataclass(frozen=True)
class Request:
    end: End
    prompt: int
    choices: int
    generated: int
    delivered: int


def requests(*kinds: End) -> st.SearchStrategy[list[Request]]:
    def made(end: End, prompt: int, choices: int, counts: tuple[int, int]) -> Request:
        return Request(end, prompt, choices if end is End.COMPLETE else 1, max(counts), min(counts))

    sizes = st.integers(0, 1000)
    return st.lists(st.builds(made, st.sampled_from(kinds), sizes, st.integers(1, 4), st.tuples(sizes, sizes)), max_size=20)


def growth(of: Sequence[Request]) -> Growth:
    """Return the counts of the engine."""
    finished = [each for each in of if each.end in (End.COMPLETE, End.FINISHED, End.DIRECT)]
    return Growth(
        sum(each.prompt * each.choices for each in of),
        sum(each.generated for each in of),
        sum(each.prompt * each.choices for each in finished),
        sum(each.generated for each in finished),
        len(of),
    )


def rows(of: Sequence[Request]) -> LedgerSums:
    """Return the sums of the ledger."""
    complete = [each for each in of if each.end is End.COMPLETE]
    truncated = [each for each in of if each.end in (End.ABORTED, End.FINISHED)]
    lost = [each for each in of if each.end is End.LOST]
    prompt = RowSums(*(sum(each.prompt for each in part) for part in (complete, truncated, lost)))
    again = sum(each.prompt * (each.choices - 1) for each in complete)
    completion = RowSums(
        sum(each.generated for each in complete), sum(each.delivered for each in truncated), sum(each.delivered for each in lost)
    )
    return LedgerSums(replace(prompt, choices=again), completion, sum(each.end is not End.DIRECT for each in of))


def total_of(classes: Classes) -> int:
    return sum(getattr(classes, field.name) for field in fields(classes) if field.name != "engine")


@given(requests(*End))
def test_the_classes_add_up_to_what_the_engine_has_counted(of: list[Request]) -> None:
    for classes, engine in zip(classify(growth(of), rows(of)), (growth(of).prompt, growth(of).completion), strict=True):
        assert classes.engine == engine == total_of(classes)
        assert classes.difference == 0
        assert all(getattr(classes, field.name) >= 0 for field in fields(classes))


@given(requests(End.COMPLETE, End.ABORTED, End.FINISHED, End.PREFILL, End.LOST))
def test_each_class_is_exact_without_direct_use(of: list[Request]) -> None:
    prompt, completion = classify(growth(of), rows(of))
    assert prompt.direct_use == completion.direct_use == 0
    assert prompt.cancelled_prefill == sum(each.prompt for each in of if each.end is End.PREFILL)
    assert prompt.choices == sum(each.prompt * (each.choices - 1) for each in of)
    left = [each for each in of if each.end is not End.COMPLETE]
    assert completion.not_delivered == sum(each.generated - (0 if each.end is End.PREFILL else each.delivered) for each in left)
    assert completion.lost == sum(each.delivered for each in of if each.end is End.LOST)


@given(requests(End.COMPLETE, End.ABORTED, End.PREFILL, End.LOST, End.DIRECT))
def test_direct_use_is_exact_if_all_truncated_responses_were_aborted(of: list[Request]) -> None:
    direct = [each for each in of if each.end is End.DIRECT]
    prompt, completion = classify(growth(of), rows(of))
    assert (prompt.direct_use, completion.direct_use) == (sum(each.prompt for each in direct), sum(each.generated for each in direct))


@given(requests(*End))
def test_direct_use_is_never_below_the_truth(of: list[Request]) -> None:
    direct = [each for each in of if each.end is End.DIRECT]
    for known in (growth(of), replace(growth(of), responses=None)):
        prompt, completion = classify(known, rows(of))
        assert prompt.direct_use >= sum(each.prompt for each in direct)
        assert completion.direct_use >= sum(each.generated for each in direct)


def test_choices_of_a_truncated_response_are_those_that_the_engine_began() -> None:
    ledger = LedgerSums(RowSums(truncated=100, truncated_choices=200), RowSums(truncated=7), 1)
    began = [classify(Growth(prompt, 30, 0, 0, 1), ledger)[0] for prompt in (100, 200, 300, 350)]
    assert [(each.choices, each.cancelled_prefill) for each in began] == [(0, 0), (100, 0), (200, 0), (200, 50)]


@given(requests(*End), requests(End.COMPLETE, End.FINISHED))
def test_copies_of_requests_are_a_part_of_the_rows(of: list[Request], copies: list[Request]) -> None:
    all_rows, own = rows([*of, *copies]), rows(copies)
    known = replace(
        all_rows,
        prompt=replace(all_rows.prompt, mirrored=own.prompt.total),
        completion=replace(all_rows.completion, mirrored=own.completion.total),
    )
    without = classify(growth([*of, *copies]), all_rows)
    for classes, expected, mirrored in zip(classify(growth([*of, *copies]), known), without, (own.prompt, own.completion), strict=True):
        assert classes == replace(expected, ledger=expected.ledger - mirrored.total, mirrored=mirrored.total)


def test_tokens_that_the_server_does_not_report_are_a_class() -> None:
    prompt, _ = classify(Growth(50, 0, 50, 0, 1), LedgerSums(requests=1, uncounted=1))
    assert (prompt.uncounted, prompt.direct_use, prompt.difference) == (50, 0, 0)


def test_an_estimate_above_the_count_of_the_engine_is_a_class() -> None:
    ledger = LedgerSums(RowSums(truncated=12, estimated=12), RowSums(complete=30, truncated=5, estimated=5), 2)
    prompt, completion = classify(Growth(10, 27, 0, 27, 2), ledger)
    assert (prompt.estimates, prompt.difference) == (-2, 0)
    assert (completion.estimates, completion.difference) == (-5, -3)


def test_what_only_the_ledger_has_is_a_difference() -> None:
    prompt, completion = classify(Growth(10, 5, 10, 5, 1), LedgerSums(RowSums(complete=12), RowSums(complete=5), 1))
    assert (prompt.difference, completion.difference) == (-2, 0)


# Windows


def sample(time: float, count: int, *, quiet: bool = True, started: int = 1000, server: str = "one") -> EngineSample:
    return EngineSample(server, "tiny", started, time, quiet, count, 2 * count, count, count, count)


def times(found: Sequence[ReconciledWindow]) -> list[tuple[float, float, int]]:
    return [(each.begin, each.end, each.growth.prompt) for each in found]


def test_a_window_ends_at_the_last_quiet_samples() -> None:
    samples = [sample(10, 1), sample(20, 3), sample(30, 5, quiet=False), sample(40, 8), sample(50, 9, quiet=False)]
    assert times(windows(samples, 35.0, 45.0)) == [(20, 40, 5)]
    assert times(windows(samples, 0.0, 60.0)) == [(10, 40, 7)]
    assert all(each.is_quiet for each in windows(samples, 35.0, 45.0))


def test_a_window_of_a_busy_engine_ends_at_its_last_sample() -> None:
    late = 10 + QUIET_WITHIN + 1
    [found] = windows([sample(10, 1), sample(late, 9, quiet=False)], 0.0, late)
    assert (found.end, found.is_quiet, found.growth.prompt) == (late, False, 8)


def test_a_restart_begins_a_window_at_zero() -> None:
    restarted = sample(32, 4, started=30_000)
    samples = [sample(10, 1), sample(20, 7), restarted.at_start(30.0), restarted]
    found = windows(samples, 0.0, 60.0)
    assert times(found) == [(10, 20, 6), (30, 32, 4)]
    assert gaps(found, 5.0, 60.0) == [(5.0, 10), (20, 30), (32, 60.0)]


def test_a_counter_that_falls_is_a_restart() -> None:
    samples = [sample(10, 1, started=0), sample(20, 7, started=0), sample(30, 2, started=0), sample(40, 3, started=0)]
    assert times(windows(samples, 0.0, 60.0)) == [(10, 20, 6), (20, 40, 3)]


def test_engines_of_one_server_at_the_same_time_share_a_window() -> None:
    samples = [sample(10, 0), sample(30, 5), sample(20, 0, started=2000), sample(40, 9, started=2000), sample(10, 0, server="other")]
    [found] = windows([*samples, sample(15, 1, server="other")], 0.0, 50.0)[:1]
    assert (found.begin, found.end, found.growth.prompt, found.is_quiet) == (10, 40, 14, False)


COUNTS = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50), st.booleans(), st.integers(0, 9)), min_size=1, max_size=30)


@given(COUNTS, st.lists(st.integers(0, 3000), min_size=2, max_size=6))
def test_consecutive_windows_count_everything_once(steps: list[tuple[int, int, bool, int]], bounds: list[int]) -> None:
    """Split a time anywhere: the growth of its parts is the growth of the whole. Engines restart now and then."""
    samples, time, count, started = [], 0, 0, 1000
    for seconds, tokens, quiet, luck in steps:
        time, count = time + seconds, count + tokens
        if luck == 0:
            count, started = 0, time * 1000
        samples.append(sample(time, count, quiet=quiet, started=started))
    bounds.sort()
    parts = [each for since, until in pairwise(bounds) for each in windows(samples, since, until)]
    whole = windows(samples, bounds[0], bounds[-1])
    assert sum(each.growth.prompt for each in parts) == sum(each.growth.prompt for each in whole)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=8), st.integers(0, 50), st.integers(50, 120))
def test_gaps_and_windows_cover_the_time(starts: list[tuple[int, int]], since: int, until: int) -> None:
    found, at = [], 0
    for start, length in sorted(starts):
        begin = max(start, at)
        at = begin + length
        found.append(ReconciledWindow("one", "tiny", begin, at, True, Growth(0, 0, 0, 0, 0)))
    covered = {second for window in found for second in range(int(window.begin), int(window.end))}
    uncovered = [second for begin, end in gaps(found, since, until) for second in range(int(begin), int(end))]
    assert len(uncovered) == len(set(uncovered))
    assert {second for second in range(since, until) if second not in covered} <= set(uncovered)
    assert not covered & set(uncovered) & set(range(since, until))


def test_unbilled_tokens_are_those_of_both_kinds() -> None:
    one = ReconciledServer("tiny", "one", 0.0, 1.0, 1, Classes(cancelled_prefill=3, direct_use=4), Classes(not_delivered=5, direct_use=6))
    expected = {("tiny", "not_delivered"): 10, ("tiny", "cancelled_prefill"): 6, ("tiny", "direct_use"): 20}
    assert unbilled([one, one]) == expected


@pytest.mark.parametrize("change", [{"time": 9.0}, {"quiet": False}])
def test_a_sample_without_new_counts_is_recognized(change: dict[str, float]) -> None:
    assert replace(ZERO, **change).has_counters_of(ZERO)  # type: ignore[arg-type]  # the values fit their fields
    assert not replace(ZERO, prompt=1).has_counters_of(ZERO)
