"""A key starves if it waits and only others are served. A pause of its client, and a long request, are no starvation."""

from __future__ import annotations

from gateway.control.starvation import Starvation, Unserved
from gateway.telemetry.metrics import Series

BATCH, CHAT = ("m", "batch", "t", "nightly"), ("m", "chat", "", "c")
EVERY = 15


def watched(minutes: int, waiting: list[int], *, dispatched: int = 0, others: int = 1, in_flight: float = 1e-9) -> list[Unserved]:
    """Return what is found at the end. ``waiting``: the waiting requests, in turn. ``dispatched`` and ``others`` are for each sample."""
    starvation, found = Starvation(), list[Unserved]()
    for number in range(60 * minutes // EVERY + 1):
        series: dict[Series, list[float]] = {
            Series("queue_waiting_requests", BATCH): [waiting[number % len(waiting)]],
            Series("queue_requests_total", BATCH): [number * dispatched],
            Series("queue_requests_total", CHAT): [number * others],
            Series("queue_service_in_flight", BATCH): [in_flight],
        }
        found = starvation.update(1000.0 + EVERY * number, series)
    return found


def test_a_key_that_waits_while_others_are_served() -> None:
    [found] = watched(2, [3])
    assert (found.model, found.class_name, found.team, found.key, found.waiting) == (*BATCH, 3)


def test_it_takes_two_minutes() -> None:
    assert watched(1, [3]) == []


def test_a_client_that_tries_again_still_waits() -> None:
    assert len(watched(4, [3, 0])) == 1
    assert watched(4, [3, 0, 0, 0, 0, 0]) == []


def test_what_is_no_starvation() -> None:
    assert watched(10, [0]) == []
    assert watched(10, [3], dispatched=1) == []
    assert watched(10, [3], others=0) == []
    assert watched(10, [3], in_flight=50.0) == []


def test_keys_that_do_not_wait_are_forgotten() -> None:
    starvation = Starvation()
    many = {Series("queue_waiting_requests", ("m", "default", "", f"k{at}")): [1.0] for at in range(100)}
    starvation.update(0.0, many)
    assert starvation.update(61.0, {each: [0.0] for each in many}) == []
    assert starvation.update(500.0, {Series("queue_requests_total", CHAT): [9.0]}) == []
