"""The placement log: every record reaches every other process once, in order, or counts as lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.balancing.placement_log import Kind, PlacementLog, server_key

CELLS = 256
KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8)
ENTRIES = st.lists(st.tuples(st.sampled_from([kind for kind in Kind if kind]), st.integers(0, 2**32 - 1), st.integers(0, 2**40), KEYS))


@pytest.fixture
def logs() -> Iterator[list[PlacementLog]]:
    with made() as found:
        yield found


class made:
    """Three mappings of one log, each with a separate section."""

    def __enter__(self) -> list[PlacementLog]:
        self._stack = ExitStack()
        first = self._stack.enter_context(closing(PlacementLog.create(3, 0, CELLS)))
        others = [self._stack.enter_context(closing(PlacementLog(os.dup(first.fd), section, CELLS))) for section in (1, 2)]
        return [first, *others]

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@given(st.lists(ENTRIES, max_size=6))
def test_every_record_is_read_once_and_in_order(rounds: list[list[tuple[Kind, int, int, list[int]]]]) -> None:
    with made() as (one, two, reader):
        for entries in rounds:
            for number, (kind, server, value, keys) in enumerate(entries):
                (one, two)[number % 2].write(kind, server, value, keys)
                read = [(record.section, record.kind, record.server, record.value, list(record.keys)) for record in reader.read()]
                assert read == [(number % 2, kind, server, value, keys)]
        assert not list(reader.read()) and not reader.lost
        assert [record.section for record in one.read()] == [1] * sum(len(entries) // 2 for entries in rounds) or one.lost


def test_a_reader_that_falls_behind_continues_with_the_newest(logs: list[PlacementLog]) -> None:
    writer, reader, _ = logs
    for number in range(500):
        writer.write(Kind.PLACED, 1, number, [number])
    assert not list(reader.read()) and reader.lost == 1
    writer.write(Kind.PLACED, 1, 500, [500])
    assert [record.value for record in reader.read()] == [500]


def test_a_record_that_does_not_fit_at_the_end_of_a_lap_starts_the_next_one(logs: list[PlacementLog]) -> None:
    writer, reader, _ = logs
    for number in range(3 * CELLS):
        writer.write(Kind.PLACED, 1, number, [number, 1, 2])  # of 5 cells, which do not divide those of a lap
        assert [(record.value, list(record.keys)) for record in reader.read()] == [(number, [number, 1, 2])]
    assert not reader.lost


def test_a_new_process_reads_the_history_and_its_predecessors_records(logs: list[PlacementLog]) -> None:
    first, second, _ = logs
    first.write(Kind.PLACED, 1, 10, [1])
    second.write(Kind.PLACED, 2, 20, [2])
    with closing(PlacementLog(os.dup(first.fd), 0, CELLS)) as successor:
        assert sorted(record.value for record in successor.read()) == [10, 20]
        successor.write(Kind.STARTED, 0)
        assert not list(successor.read())
    assert [record.kind for record in second.read()] == [Kind.PLACED, Kind.STARTED]


def test_long_records_are_cut_not_refused(logs: list[PlacementLog]) -> None:
    writer, reader, _ = logs
    writer.write(Kind.PLACED, 1, 0, range(10_000))
    (record,) = reader.read()
    assert list(record.keys) == list(range(len(record.keys))) and 0 < len(record.keys) < CELLS


def test_servers_have_keys_that_fit() -> None:
    assert 0 <= server_key("http://10.0.0.1:8000") < 2**32
