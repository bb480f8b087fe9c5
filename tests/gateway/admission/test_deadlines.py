"""Requests with a deadline: which may wait, which are refused, and that a refused client has its place when it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import bookings
from gateway.admission.bookings import Booking
from gateway.admission.deadlines import LONGEST_RETRY, DeadlinePlan, ttft_of
from gateway.admission.fair_queue import FairQueue, Share
from gateway.snapshot.snapshot import Key, QueueClass, Slo
from tests.faults.invariants import unharmed
from tests.gateway.admission.simulated_queue import Client, SimulatedQueue
from tests.gateway.admission.test_bookings import unshared
from tests.gateway.admission.test_queue_full_servers import KEYS, bounded, held, queued, send_requests
from tests.support.examples import examples
from tests.support.running import until
from tests.support.wire import chat, request, request_once

SLOTS, STEP, OUTPUT = 8, 0.03, 12
CAPACITY = SLOTS / (OUTPUT * STEP + 0.02)
"""Requests per second."""
TTFT = 1.0
ONE = Key("one")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(b"2s", 2.0), (b"500ms", 0.5), (b"2", 2.0), (b"1.5", 1.5), (b"", None), (b"0", None), (b"-1s", None), (b"2h", None), (b"nan", None)],
)
def test_the_header(header: bytes, seconds: float | None) -> None:
    assert ttft_of(header) == seconds


# Load over the capacity


@dataclass(frozen=True)
class Outcome:
    good: int
    returned: int
    admitted: int


def _arrivals(draw: Random, curve: Callable[[float], float], seconds: float) -> Iterator[float]:
    rate = 1.5 * CAPACITY
    peak = max(curve(each / 100 * seconds) for each in range(100))
    at = draw.expovariate(rate * peak)
    while at < seconds:
        if draw.random() < curve(at) / peak:
            yield at
        at += draw.expovariate(rate * peak)


def _play(patch: pytest.MonkeyPatch, curve: Callable[[float], float], keys: int, slo: Slo, *, seconds: float = 20.0) -> Outcome:
    """Let clients arrive at 1.5 times the capacity, each of which has another request."""
    draw = Random(1)
    served = SimulatedQueue(patch, SLOTS, slo, step=STEP)
    clients = []
    for after in _arrivals(draw, curve, seconds):
        client = Client(Key(f"k{draw.randrange(keys)}"), draw.randint(6, 18), draw.randint(195, 203), delay=draw.random() / 50)
        clients.append(client)
        served.arrive(client, after)
    served.run(seconds + 10.0)
    attempts = [each for client in clients for each in client.attempts]
    later = [each for client in clients for each in client.attempts[1:]]
    assert all(each.dispatched is None or each.dispatched - each.arrived <= TTFT for each in attempts) or slo.ttft is None
    good = sum(each.first_token is not None and each.first_token - each.arrived <= TTFT for each in attempts)
    return Outcome(good, len(later), sum(each.dispatched is not None for each in later))


CURVES: dict[str, Callable[[float], float]] = {
    "steady": lambda _: 1.0,
    "bursts": lambda at: 3.5 if at % 4 < 1 else 1 / 6,
    "day": lambda at: 1 - 0.8 * math.cos(2 * math.pi * at / 20.0),
}


@pytest.mark.parametrize("keys", [1, 5])
@pytest.mark.parametrize("curve", CURVES)
def test_more_requests_are_in_time_and_clients_that_return_have_their_place(monkeypatch: pytest.MonkeyPatch, curve: str, keys: int) -> None:
    fifo = _play(monkeypatch, CURVES[curve], keys, Slo())
    found = _play(monkeypatch, CURVES[curve], keys, Slo(TTFT))
    assert fifo.returned == 0 and found.good >= 2 * fifo.good
    assert found.returned > 20 and found.admitted >= (0.95 if keys == 1 else 0.93) * found.returned


# One request


def _learned(patch: pytest.MonkeyPatch, slo: Slo, classes: Sequence[QueueClass] = ()) -> SimulatedQueue:
    """Return a queue of one slot whose dispatches were four seconds apart. Nothing waits; one request runs until 18.5 s. Now it is 11 s."""
    served = SimulatedQueue(patch, 1, slo, classes=classes, step=1.0, prefill=0.0)
    for after in (0.0, 1.0):
        served.arrive(Client(ONE, output=5, ttft=100.0), after)
    served.arrive(Client(ONE, output=8), 10.5)
    served.run(11.0)
    return served


def _arrives(served: SimulatedQueue, client: Client) -> Client:
    served.arrive(client, served.now - 1000.0)
    served.run(served.now - 1000.0)
    return client


def test_a_request_is_refused_at_once_if_its_predicted_wait_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    served = _learned(monkeypatch, Slo(2.0))
    refused = _arrives(served, Client(ONE, returns=0)).attempts[0]
    assert refused.reason == "queue_predicted" and refused.refused == refused.arrived
    assert refused.retry_after == 5, "four seconds until the next dispatch, and a quarter for caution"
    assert served.metrics.cells("queue_refused_total", "m", "default", "", "one", "predicted")[0] == 1.0
    waits = _arrives(served, Client(ONE, ttft=30.0))
    assert waits.attempts[0].reason is None, "the client's own objective takes precedence"
    assert _arrives(served, Client(ONE, ttft=1.0, returns=0)).attempts[0].reason == "queue_predicted"


def test_a_class_has_its_own_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = (QueueClass("fast", slo=Slo(1.0)), QueueClass("default", slo=Slo(itl=0.1)))
    served = _learned(monkeypatch, Slo(50.0), classes=classes)
    assert _arrives(served, Client(ONE)).attempts[0].reason is None, "a class without the value has the model's"
    assert _arrives(served, Client(Key("f", queue_class="fast"), returns=0)).attempts[0].reason == "queue_predicted"


def test_a_request_whose_deadline_passes_gives_its_slot_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimulatedQueue(monkeypatch, 1, Slo(), step=1.0)
    served.arrive(Client(ONE, output=5), 0.0)
    late, other = Client(ONE, ttft=2.0, returns=0), Client(ONE)
    for after, client in ((1.0, late), (1.5, other)):
        served.arrive(client, after)
    served.run(20.0)
    [attempt] = late.attempts
    assert attempt.reason == "queue_late" and attempt.refused is not None and 1003.0 <= attempt.refused < 1003.6
    assert other.served


def test_the_earliest_deadline_of_a_key_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimulatedQueue(monkeypatch, 1, Slo(), step=1.0)
    served.arrive(Client(ONE, output=1), 0.0)
    clients = [Client(ONE, output=1, ttft=ttft) for ttft in (None, 90.0, 50.0, 70.0)]
    for client in clients:
        served.arrive(client, 0.1)
    served.run(20.0)
    times = [client.attempts[0].dispatched for client in clients]
    assert all(times) and sorted(times, key=str) == [times[2], times[3], times[1], times[0]]


def test_a_client_that_returns_is_first_and_no_other_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    served = _learned(monkeypatch, Slo())
    refused = _arrives(served, Client(ONE, size=2000, ttft=3.0))
    unhurried = _arrives(served, Client(ONE, size=400, output=1))
    served.run(15.0)
    other = _arrives(served, Client(ONE, size=300, ttft=7.0, returns=0))
    served.run(30.0)
    assert [each.reason for each in refused.attempts] == ["queue_predicted", None]
    assert refused.attempts[1].arrived == pytest.approx(1016.01)
    assert refused.attempts[1].dispatched == 1018.5 and unhurried.attempts[0].dispatched == 1028.5
    assert other.attempts[0].reason == "queue_predicted", "four seconds would be enough without the booking"


def test_a_client_that_does_not_return_costs_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    served = _learned(monkeypatch, Slo())
    _arrives(served, Client(ONE, size=500, ttft=3.0, returns=0))
    served.run(18.2)
    assert served.queue._plan is not None and len(served.queue._plan.bookings) == 1
    served.run(18.4)
    assert not len(served.queue._plan.bookings)
    assert served.metrics.cells("queue_bookings", "m")[0] == 0
    assert _arrives(served, Client(ONE, size=300, ttft=7.0)).attempts[0].reason is None


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 10.0), st.integers(1, 40), st.sampled_from([None, 0.3, 1.0, 5.0]), st.integers(0, 2), st.integers(0, 2)),
        max_size=60,
    )
)
def test_whatever_arrives_nothing_is_dispatched_late_and_nothing_remains(
    arrivals: list[tuple[float, int, float | None, int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        served = SimulatedQueue(patch, 2, Slo(), size=20)
        clients = []
        for number, (after, output, ttft, key, returns) in enumerate(arrivals):
            client = Client(Key(f"k{key}"), output, 40 + number, ttft, returns)
            clients.append(client)
            served.arrive(client, after)
        served.run(400.0)
        for client in clients:
            assert client.attempts[-1].dispatched is not None or client.attempts[-1].reason is not None
            for each in client.attempts:
                assert client.ttft is None or each.dispatched is None or each.dispatched - each.arrived <= client.ttft + 1e-9
                assert each.retry_after is None or each.retry_after >= 1
        plan, queue = served.queue._plan, served.queue._waiting
        assert not len(queue) and (plan is None or not len(plan.bookings))
        assert abs(queue._root.backlog) < 1e-6 and served.server.in_flight == 0


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.sampled_from([0.6, 1.0, 3.0]), st.integers(0, 3)), max_size=80))
def test_no_more_is_booked_for_a_time_than_can_be_served_then(bookings_: list[tuple[float, float, int]]) -> None:
    queue: FairQueue[str] = FairQueue()
    plan, now, interval = DeadlinePlan(queue, 0.0, unshared()), 0.0, 0.1
    for _ in range(200):
        now += interval
        plan.rate.record_dispatch(1.0, now)
    for pause, slack, key in bookings_:
        now += pause
        leaf = queue.leaf([Share(str(key), 1.0)])
        found = plan.add_booking(Booking(now, 1.0, leaf, 10, now), slack, 1000, now)
        assert found is not None and 1 <= found[0] <= LONGEST_RETRY
    for each in plan.bookings.between(0.0, math.inf):
        within = plan.bookings.between(each.at, each.at + 0.6)
        assert len(within) * interval <= 3.0, "the largest slack"


# Over sockets


async def test_a_refused_client_returns_and_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookings, "RETURN_GRACE", 1e6)
    monkeypatch.setattr(bookings, "_OWN", 1e6)
    async with held() as slow, unharmed([bounded(slow.server.port, slo=Slo(600.0))], KEYS) as served:
        tasks = await send_requests(served, "a", 1)
        await slow.reaches(1)
        tasks += await send_requests(served, "a", 2)
        await until(lambda: queued(served) == 1)
        await slow.let_go()
        await slow.reaches(2)  # from here on the rate is known
        reply = await request_once(served.port, request(chat(seed=3), token="sk-a", extra=("x-vllm-gateway-ttft: 1ms",)))
        assert (reply.status, reply.error["code"]) == (503, "overloaded") and int(reply.headers["retry-after"]) >= 1
        plan = served.worker.requests.queues._queues["tiny"]._plan
        assert plan is not None
        [booking] = plan.bookings.between(0.0, math.inf)
        await until(lambda: served.value("queue_bookings", "tiny") == 1)
        await until(lambda: monotonic() >= booking.at, 60.0)
        tasks += await send_requests(served, "a", 4)
        await until(lambda: queued(served) == 1)
        assert len(plan.bookings) == 1, "a first request with as many bytes"
        tasks += await send_requests(served, "a", 3)
        await until(lambda: queued(served) == 2)
        assert not len(plan.bookings)
        await slow.let_go(3)
        assert [await each for each in tasks] == [200, 200, 200, 200]
        [refused] = [each for each in served.context.records if each.status == 503]
        assert refused.reason == "queue_predicted" and "was predicted" in str(refused.detail)
        assert served.value("queue_refused_total", "tiny") == 1
