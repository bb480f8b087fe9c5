"""Counts in shared memory: one writes, another reads, a third takes over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.telemetry.shared_counters import SharedCounters, SharedCountersFullError


@pytest.fixture
def counters() -> Iterator[SharedCounters]:
    made = SharedCounters.create("test", 4096)
    yield made
    made.close()


def again(counters: SharedCounters) -> SharedCounters:
    """The same memory in another's hands."""
    return SharedCounters(os.dup(counters.fd))


def test_a_reader_sees_what_is_written(counters: SharedCounters) -> None:
    reader = again(counters)
    try:
        assert list(reader.readings()) == []
        cells = counters.cells("a", 2)
        assert list(reader.readings()) == [("a", (0.0, 0.0))]
        cells[1] += 2.5
        counters.cells("ü" * 9, 1)[0] = 1.0
        assert list(reader.readings()) == [("a", (0.0, 2.5)), ("ü" * 9, (1.0,))]
        assert list(reader.readings()) == list(counters.readings())
    finally:
        reader.close()


def test_a_series_is_made_once(counters: SharedCounters) -> None:
    counters.cells("a", 1)[0] = 1.0
    assert counters.cells("a", 1)[0] == 1.0
    assert len(list(counters.readings())) == 1


def test_a_successor_continues_the_counts_of_its_predecessor(counters: SharedCounters) -> None:
    counters.cells("a", 1)[0] = 5.0
    successor = again(counters)
    try:
        successor.cells("a", 1)[0] += 1
        successor.cells("b", 1)[0] += 1
        assert dict(counters.readings()) == {"a": (6.0,), "b": (1.0,)}
        assert counters.cells("b", 1)[0] == 1.0, "no second record for what the other one made"
    finally:
        successor.close()


def test_a_predecessor_that_died_in_the_middle_leaves_nothing(counters: SharedCounters) -> None:
    counters.cells("a", 1)[0] = 5.0
    used = int.from_bytes(os.pread(counters.fd, 8, 0), "little")
    os.pwrite(counters.fd, b"\xff" * 512, used)  # a record that it had not made visible
    assert [name for name, _ in counters.readings()] == ["a"]
    assert list(counters.cells("b", 8)) == [0.0] * 8


def test_full_counters_reject_new_series_and_keep_the_others(counters: SharedCounters) -> None:
    made = 0
    with pytest.raises(SharedCountersFullError):  # noqa: PT012  # how many fit is the layout's business
        while True:
            counters.cells(f"series {made}", 4)[0] = made
            made += 1
    assert made > 50
    assert [values[0] for _, values in counters.readings()] == list(range(made))
    assert counters.cells("series 3", 4)[0] == 3


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=20), st.lists(st.floats(allow_nan=False), max_size=5), max_size=12))
def test_what_was_written_is_read(series: dict[str, list[float]]) -> None:
    counters = SharedCounters.create("test", 1 << 16)
    try:
        for name, values in series.items():
            cells = counters.cells(name, len(values))
            for index, value in enumerate(values):
                cells[index] = value
        other = again(counters)
        assert list(other.readings()) == [(name, tuple(values)) for name, values in series.items()]
        other.close()
    finally:
        counters.close()
