"""A server's limit over several workers: it is exact, no slot stays free while a request waits, and each worker gets its part."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upstream.balancing.policies.least_busy import LeastBusy
from upstream.balancing.pool import NoServerError, Pool, SharedPool
from upstream.balancing.server import Condition, ServerSpec
from upstream.balancing.shared_limit import Peer, SharedLimit, SharedServer
from upstream.http.address import Address


class Workers:
    """Workers that share a server. Their requests wait until they get a slot; signals are delivered when a test says so."""

    def __init__(self, limit: int, count: int) -> None:
        self.limit = limit
        parts = [limit // count + (number < limit % count) for number in range(count)]
        self.in_flight = [[0.0] for _ in range(count)]
        self.queued = [[0.0] for _ in range(count)]
        self.signals: deque[int] = deque()
        every = [Peer(number, self.in_flight[number], self.queued[number]) for number in range(count)]
        self.limits = [
            SharedLimit(
                limit,
                number,
                parts,
                self.queued[number],
                nullcontext(),
                partial(self._others, every, number),
                self.signals.append,
            )
            for number in range(count)
        ]

    def _others(self, every: list[Peer], number: int) -> list[Peer]:
        return [peer for peer in every if peer.number != number]

    @property
    def total(self) -> float:
        return sum(each[0] for each in self.in_flight)

    def dispatch(self, number: int) -> None:
        while self.queued[number][0] and self.limits[number].take(self.in_flight[number]):
            self.queued[number][0] -= 1
            assert self.total <= self.limit

    def arrive(self, number: int) -> None:
        self.queued[number][0] += 1
        self.dispatch(number)

    def finish(self, number: int) -> None:
        if self.in_flight[number][0]:
            self.in_flight[number][0] -= 1
            self.check(number)

    def disconnect(self, number: int) -> None:
        """Remove a queued request: its client has disconnected."""
        if self.queued[number][0]:
            self.queued[number][0] -= 1

    def die(self, number: int) -> None:
        """End a worker. Control clears its counts, and wakes all."""
        self.in_flight[number][0] = self.queued[number][0] = 0
        self.signals.extend(range(len(self.limits)))

    def check(self, number: int) -> None:
        self.dispatch(number)
        self.limits[number].offer(self.in_flight[number][0])

    def deliver(self) -> None:
        for _ in range(1000):
            if not self.signals:
                return
            self.check(self.signals.popleft())
        raise AssertionError("the workers wake each other without an end")


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "finish", "finish", "disconnect", "die", "deliver"]), st.integers(0, 3)), max_size=80
)


@given(st.integers(4, 9), STEPS)
def test_the_limit_is_exact_and_no_slot_stays_free_while_a_request_waits(limit: int, steps: list[tuple[str, int]]) -> None:
    workers = Workers(limit, 4)
    for step, number in steps:
        if step == "deliver":
            workers.deliver()
        else:
            getattr(workers, step)(number)
    workers.deliver()
    assert workers.total <= limit
    assert workers.total == limit or not any(each[0] for each in workers.queued)


def test_one_worker_may_use_all_slots_and_gives_them_back_when_another_needs_its_part() -> None:
    workers = Workers(8, 4)
    for _ in range(20):
        workers.arrive(0)
    assert workers.in_flight[0] == [8]
    for number in (1, 2, 3):
        for _ in range(5):
            workers.arrive(number)
    for _ in range(6):
        workers.finish(0)
        workers.deliver()
    assert workers.in_flight == [[2], [2], [2], [2]]


def test_a_worker_may_use_reserved_slots_while_another_has_its_part_of_the_others() -> None:
    workers = Workers(6, 2)
    workers.in_flight[1][0], workers.queued[1][0] = 2, 3  # of a later class, to which 4 slots are open
    for limit in workers.limits:
        limit.parts = [2, 2]
    for _ in range(4):
        workers.arrive(0)
    assert workers.in_flight == [[4], [2]]


def test_a_server_that_another_worker_has_filled_is_not_chosen() -> None:
    workers = Workers(2, 2)
    server = SharedServer(ServerSpec("http://a", Address("a", 80), "m"), Condition.UP)
    server.limit, server.shared, server.in_flight_cells = 2, workers.limits[0], workers.in_flight[0]
    pool = SharedPool([server], LeastBusy([server]))
    assert server.is_shared and pool.choose() is server and workers.in_flight[0] == [1]
    server.start_exchange()
    server.finish_exchange()
    assert (server.in_flight, workers.in_flight[0]) == (0, [0])
    workers.in_flight[1][0] = 2
    assert not server.take_slot() and workers.in_flight[0] == [0] and not pool.has_capacity()
    with pytest.raises(NoServerError) as caught:
        pool.choose()
    assert caught.value.full
    workers.in_flight[1][0] = 0
    resumed = list[bool]()
    pool.on_capacity(lambda: resumed.append(pool.has_capacity()))
    server.update_rankings()
    assert resumed == [True]
    assert pool.choose() is server
    server.start_exchange()
    workers.queued[1][0] = 1
    server.finish_exchange()
    assert workers.in_flight[0] == [0] and list(workers.signals) == [1]


@pytest.mark.parametrize("before", [Pool, SharedPool])
def test_a_slot_is_taken_once_for_a_request_of_an_older_snapshot(before: type[Pool]) -> None:
    """A reload may have given the servers a limit since the request arrived."""
    server = SharedServer(ServerSpec("http://a", Address("a", 80), "m"), Condition.UP)
    old = before([server], LeastBusy([server]))
    old.retire()
    workers = Workers(2, 2)
    server.limit, server.shared, server.in_flight_cells = 2, workers.limits[0], workers.in_flight[0]
    old.successor = SharedPool([server], LeastBusy([server]))
    assert old.choose() is server
    server.start_exchange()
    assert workers.in_flight[0] == [1]
    server.finish_exchange()
    assert workers.in_flight[0] == [0]


def test_queued_requests_come_before_a_new_one() -> None:
    server = SharedServer(ServerSpec("http://a", Address("a", 80), "m"), Condition.UP)
    workers = Workers(1, 1)
    server.limit, server.shared, server.in_flight_cells = 1, workers.limits[0], workers.in_flight[0]
    pool = SharedPool([server], LeastBusy([server]))
    pool.on_capacity(lambda: server.start_exchange() if server.take_slot() else None)  # a queued request
    with pytest.raises(NoServerError):
        pool.choose()


def test_without_a_limit_it_is_like_any_other_server() -> None:
    server = SharedServer(ServerSpec("http://a", Address("a", 80), "m"), Condition.UP)
    server.start_exchange()
    assert (server.in_flight, server.full, server.is_shared) == (1, False, False)
    server.finish_exchange()
    assert server.in_flight == 0


@pytest.mark.parametrize(("queued_by_other", "expected"), [(0.0, False), (1.0, True)])
def test_a_slot_that_would_go_to_another_worker_is_not_worth_a_preemption(queued_by_other: float, expected: bool) -> None:
    """The first worker has both slots, and the other one none: a slot that it freed would be owed."""
    workers = Workers(2, 2)
    server = SharedServer(ServerSpec("s", Address(port=1), "m"), Condition.UP)
    server.shared, server.in_flight_cells = workers.limits[0], workers.in_flight[0]
    workers.in_flight[0][0] = 2.0
    workers.queued[1][0] = queued_by_other
    assert server.full and server.is_over_limit is expected and server.would_serve(0) is not expected
