"""The tokens that a request is charged for, depending on how it ended."""

from __future__ import annotations

import pytest

from gateway.api.settlement import BYTES_PER_TOKEN, NOTHING, Delivery, Method, Settlement, settle
from gateway.api.usage import Usage
from tests.support.rows import each_row

FINAL, RUNNING, PROMPT = Usage(30, 7, 4, 2), Usage(30, 5), Usage(30, 0, 4)


@each_row(
    ("delivery", "settlement"),
    [
        (Delivery(200, FINAL), Settlement(FINAL)),
        (Delivery(200, FINAL, RUNNING, events=9), Settlement(FINAL)),
        (Delivery(499, FINAL), Settlement(FINAL)),
        (Delivery(499, None, RUNNING, events=9), Settlement(RUNNING)),
        (Delivery(200, None, RUNNING, events=9), Settlement(RUNNING)),
        (Delivery(499, None, None, PROMPT, 6), Settlement(Usage(30, 6, 4), Method.EVENTS)),
        (Delivery(499, None, None, PROMPT, 0), Settlement(Usage(30, 0, 4))),
        (Delivery(499, events=6), Settlement(Usage(100, 6), Method.EVENTS)),
        (Delivery(200, events=6), Settlement(Usage(100, 6), Method.EVENTS)),
        (Delivery(200, estimated=0), Settlement(Usage(100), Method.BYTES)),
        (Delivery(499), NOTHING),
        (Delivery(200), NOTHING),
        (Delivery(500, FINAL, RUNNING, PROMPT, 9, True), NOTHING),
        (Delivery(400, events=9), NOTHING),
    ],
)
def test_settlements(delivery: Delivery, settlement: Settlement) -> None:
    assert settle(delivery, 100) == settlement


def test_nothing_is_estimated_if_nothing_needs_it() -> None:
    assert settle(Delivery(499, events=6), None) == settle(Delivery(200, estimated=0), None) == NOTHING
    assert settle(Delivery(499, None, RUNNING, events=6), None) == Settlement(RUNNING)


@each_row(
    ("events", "settlement"),
    [(6, Settlement(Usage(41, 6), Method.EVENTS)), (0, Settlement(Usage(41), Method.TOKENIZE))],
)
def test_a_prompt_that_the_server_counted_afterwards(events: int, settlement: Settlement) -> None:
    assert settle(Delivery(499, events=events), 100, 41) == settlement


def test_the_methods_are_those_of_the_ledger() -> None:
    assert [str(method) for method in Method] == ["events", "journal", "bytes", "tokenize"]


def test_a_settlement_never_changes() -> None:
    settlement = Settlement(FINAL)
    with pytest.raises(AttributeError):
        settlement.usage = None  # type: ignore[misc]


def test_a_token_is_four_bytes() -> None:
    """As docs/accounting.md states."""
    assert len(b"sixteen bytes ..") // BYTES_PER_TOKEN == 4
