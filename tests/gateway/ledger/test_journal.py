"""Rows in shared memory: none is torn, none is lost but for lack of room, and what a dead process held is found."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.api.settlement import Method
from gateway.api.usage import Usage, usage_tail
from gateway.ledger.journal import ROW_SIZE, Journal
from gateway.ledger.row import HEAD, LOST, UsageRow, decode, encode, frames
from tests.support.examples import examples
from tests.support.money import price

RING = 256


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.create("test", RING, 4)
    yield made
    made.close()


def taken(journal: Journal) -> list[bytes]:
    """Read and release all rows."""
    reading = journal.read()
    journal.release(reading)
    assert reading.rows == len(list(frames(reading.data)))
    return list(frames(reading.data))


def test_appended_rows_are_read_until_they_are_released(journal: Journal) -> None:
    journal.append(b"one")
    journal.append(b"two")
    reading = journal.read()
    assert list(frames(reading.data)) == list(frames(journal.read().data)) == [b"one", b"two"]
    journal.append(b"three")
    journal.release(reading)
    assert taken(journal) == [b"three"] and taken(journal) == []


def test_waiting_rows_are_counted(journal: Journal) -> None:
    journal.append(b"one")
    reading = journal.read()
    journal.append(b"four")
    assert (journal.waiting_rows, journal.waiting_bytes) == (2, 2 * HEAD.size + 7)
    journal.release(reading)
    assert (journal.waiting_rows, journal.waiting_bytes) == (1, HEAD.size + 4)
    journal.append(b"x" * RING)
    assert (journal.dropped, journal.waiting_rows) == (1, 1), "a dropped row does not wait"
    assert taken(journal) == [b"four"] and (journal.waiting_rows, journal.waiting_bytes) == (0, 0)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=120), st.none()), max_size=60))
def test_rows_are_read_in_order_around_the_ring(steps: list[bytes | None]) -> None:
    """Append rows; at None, read them."""
    journal = Journal.create("test", RING, 1)
    try:
        received: list[bytes] = []
        expected: list[bytes] = []
        for step in steps:
            if step is None:
                received += taken(journal)
                continue
            dropped = journal.dropped
            journal.append(step)
            expected += [step] * (journal.dropped == dropped)
        assert received + taken(journal) == expected
    finally:
        journal.close()


def test_a_full_ring_drops_and_counts_rows_until_there_is_space(journal: Journal) -> None:
    row = bytes(RING // 2 - HEAD.size)
    for _ in range(3):
        journal.append(row)
    assert journal.dropped == 1 and taken(journal) == [row, row]
    journal.append(b"after")
    assert taken(journal) == [b"after"] and journal.dropped == 1


def test_another_process_sees_the_rows_and_appends_behind_them(journal: Journal) -> None:
    journal.append(b"first")
    successor = Journal(os.dup(journal.fd))
    successor.append(b"second")
    assert taken(journal) == [b"first", b"second"]
    successor.close()


def test_an_incomplete_row_is_read_when_it_is_complete(journal: Journal) -> None:
    journal.append(b"whole")
    journal.append(b"torn")
    position = 64 + 2 * HEAD.size + len(b"whole")
    os.pwrite(journal.fd, b"?", position)
    reading = journal.read()
    journal.release(reading)
    assert list(frames(reading.data)) == [b"whole"] and taken(journal) == []
    os.pwrite(journal.fd, b"t", position)
    assert taken(journal) == [b"torn"]


def test_slots_hold_the_rows_of_open_requests(journal: Journal) -> None:
    slots = [journal.open_slot(name) for name in (b"a", b"b", b"c")]
    assert journal.open_rows() == [b"a", b"b", b"c"]
    assert slots[1] is not None
    journal.clear_slot(slots[1])
    assert journal.open_rows() == [b"a", b"c"]
    assert journal.open_slot(b"d") == slots[1]
    assert journal.open_slot(b"e") is not None and journal.open_slot(b"f") is None, "there are four"
    journal.clear_slots()
    assert journal.open_rows() == []


def test_what_is_too_long_for_a_slot_has_none(journal: Journal) -> None:
    assert journal.open_slot(bytes(ROW_SIZE)) is None and journal.open_rows() == []
    assert journal.open_slot(b"x" * (ROW_SIZE - HEAD.size)) is not None and len(journal.open_rows()) == 1


def test_a_slot_has_what_its_stream_has_used(journal: Journal) -> None:
    row = UsageRow("req_1", 0.0, "/v1/chat/completions", "team-a", incomplete=LOST, price=price(1.0, 3.0))
    slot = journal.open_slot(encode(row))
    assert slot is not None
    for usage in (Usage(5010, 97), Usage(5010, 98, 10, 7)):
        journal.update_slot(slot, usage_tail(usage))
    journal.update_slot(slot, b"9" * 300)  # too long
    (payload,) = journal.open_rows()
    expected = replace(row, prompt=5010, completion=98, cached=10, reasoning=7, estimated_by=Method.JOURNAL)
    assert decode(payload) == expected and expected.cost == 5_304_000
    journal.update_slot(slot, b"torn")
    assert [decode(each) for each in journal.open_rows()] == [row]
    journal.update_slot(slot, usage_tail(Usage(1, 1)))
    journal.clear_slots()
    journal.clear_slot(slot)
    assert journal.open_slot(encode(row)) == slot
    assert [decode(each) for each in journal.open_rows()] == [row], "a new row does not have the tokens of the last one"
