"""The memory of a record is reserved in steps, up to its limit."""

from __future__ import annotations

import pytest

from gateway.continuation.record_memory import RecordMemory


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [([0], []), ([1, 98, 1], [100]), ([100, 1], [100, 200]), ([101, 99], [200]), ([250, 50, 1], [300])],
)
def test_memory_is_reserved_in_steps(sizes: list[int], reserved: list[int]) -> None:
    held: list[int] = []

    def hold(size: int) -> bool:
        held.append(size)
        return size < 300

    memory = RecordMemory(hold, 100, 300)
    taken = [memory.take(size) for size in sizes]
    assert held == reserved
    assert all(taken) == (300 not in held)


def test_a_record_that_is_too_long_gets_no_memory() -> None:
    memory = RecordMemory(lambda _: True, 100, 300)
    assert [memory.take(300), memory.take(1)] == [True, False]
