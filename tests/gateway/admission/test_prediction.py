"""The predicted wait: the measured rate, the usual time to a first token, and the service that the fair order puts before a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue, Flow, Share
from gateway.admission.prediction import FirstTokenTime, ServiceRate, service_before

START = 1000.0


def measured(service: float, seconds: float, count: int = 100) -> ServiceRate:
    rate = ServiceRate(START)
    for number in range(1, count + 1):
        rate.record_dispatch(service, START + number * seconds)
    return rate


def test_the_wait_is_the_service_before_it_and_one_dispatch() -> None:
    now = START + 50.0
    assert measured(10.0, 0.5).seconds_for(40.0, now, waiting=True) == pytest.approx(4 * 0.5 + 0.5)
    assert measured(10.0, 0.5).seconds_for(0.0, now, waiting=True) == pytest.approx(0.5)


def test_a_rate_follows_a_change_and_a_pause_counts_while_requests_wait() -> None:
    rate = measured(10.0, 0.5)
    for number in range(1, 601):
        rate.record_dispatch(10.0, START + 50.0 + number * 0.1)
    now = START + 110.0
    assert rate.seconds_for(100.0, now, waiting=True) == pytest.approx(1.1, rel=0.02)
    paused = rate.seconds_for(100.0, now + 5.0, waiting=True)
    assert paused is not None and paused > 1.5
    assert rate.seconds_for(100.0, now + 5.0, waiting=False) == rate.seconds_for(100.0, now, waiting=False)


def test_what_was_never_or_long_ago_measured_is_unknown() -> None:
    assert ServiceRate(START).seconds_for(1.0, START, waiting=True) is None
    assert measured(10.0, 0.5).seconds_for(1.0, START + 81.0, waiting=False) is None
    first_token = FirstTokenTime()
    assert first_token.usual(100, START) == 0.0
    first_token.learn(0.3, 100, START)
    assert first_token.usual(100, START + 29.0) == pytest.approx(0.3) and first_token.usual(100, START + 31.0) == 0.0


def test_the_time_to_a_first_token_grows_with_the_body() -> None:
    first_token = FirstTokenTime()
    for number in range(200):
        size = 1000 * (number % 10)
        first_token.learn(0.1 + size / 10_000, size, START)
    assert first_token.usual(0, START) == pytest.approx(0.1, abs=0.02)
    assert first_token.usual(20_000, START) == pytest.approx(2.1, abs=0.1)


def queue_of(*flows: tuple[str, float, float, int]) -> tuple[FairQueue[str], list[Flow[str]]]:
    """Return a queue with flows of a name, a weight, a tag, and waiting requests of one unit of service."""
    queue: FairQueue[str] = FairQueue()
    found = [queue.leaf([Share(name, weight)]) for name, weight, _, _ in flows]
    for leaf, (name, _, tag, count) in zip(found, flows, strict=True):
        leaf.tag = tag
        for number in range(count):
            queue.put(f"{name}{number}", leaf, START, START)
            leaf.expect(1.0)
    return queue, found


def test_a_long_queue_of_another_key_counts_up_to_its_share() -> None:
    _, (light, heavy) = queue_of(("light", 1.0, 0.0, 3), ("heavy", 1.0, 0.0, 100))
    assert service_before(light, 3.0, {}) == 6.0
    assert service_before(heavy, 100.0, {}) == 103.0, "all of its own, and what the other has"
    _, (light, heavy) = queue_of(("light", 1.0, 5.0, 3), ("heavy", 2.0, 0.0, 100))
    assert service_before(light, 3.0, {}) == 3.0 + 2 * 8.0, "the other has twice the weight, and this one a debt"


def test_bookings_count_and_ranks_come_first() -> None:
    _, (one, other) = queue_of(("one", 1.0, 0.0, 0), ("other", 1.0, 0.0, 0))
    assert service_before(one, 0.0, {other: 7.0}) == 7.0
    assert service_before(one, 0.0, {}) == 0.0
    _, (one, other) = queue_of(("one", 1.0, 0.0, 0), ("other", 1.0, 9.0, 5))
    other.rank = -1
    assert service_before(one, 0.0, {}) == 5.0, "a strict class"
    other.rank = 1
    assert service_before(one, 0.0, {}) == 0.0
    assert service_before(one, 0.0, {}, waiting=False) == 0.0


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.floats(0.0, 20.0), st.integers(0, 30)), min_size=1, max_size=5))
def test_the_prediction_is_the_order_of_the_queue(flows: list[tuple[float, float, int]]) -> None:
    """The service before a request differs from what the queue dispatches before it by at most about one request of each flow."""
    queue, (leaf, *_) = queue_of(*((str(number), *flow) for number, flow in enumerate(flows)))
    predicted = service_before(leaf, leaf.backlog, {})
    queue.put("new", leaf, START + 1.0, START)
    dispatched = 0
    while (found := queue.pop(START))[0] != "new":
        queue.charge(found[1], 1.0, START)
        dispatched += 1
    assert abs(dispatched - predicted) <= 3.0 * len(flows) + 1.0
