"""Bookings of several workers: a client may return to any of them, once, and to real workers too."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.bookings import RETURN_GRACE, Booking, Bookings
from gateway.admission.fair_queue import FairQueue, Flow, Share
from gateway.admission.shared_bookings import SharedBookings
from gateway.auth.keys import hash_of
from gateway.snapshot.snapshot import Key, Slo
from gateway.telemetry.metrics import FAMILIES
from gateway.telemetry.shared_counters import SharedCells
from tests.gateway.admission.simulated_queue import Client, simulated_workers
from tests.support.controlled import Controlled, controlled
from tests.support.running import until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, chat, client, request
from tests.support.wire import Client as Connection

START = 1000.0
CELLS = FAMILIES["queue_bookings"].cells


def table(count: int = CELLS) -> SharedCells:
    return memoryview(bytearray(8 * count)).cast("d")


def workers_of(count: int, size: int = CELLS) -> list[Bookings]:
    tables = [table(size) for _ in range(count)]

    def peers(number: int) -> list[SharedCells | None]:
        return [each for other, each in enumerate(tables) if other != number]

    return [Bookings(SharedBookings(each, partial(peers, number))) for number, each in enumerate(tables)]


def leaf_of(key: str) -> Flow[str]:
    """Return the flow of a key, as each worker has its own."""
    return FairQueue[str]().leaf([Share("team", 1.0), Share(key, 1.0)])


def add_booking(bookings: Bookings, key: str, after: float, size: int = 10) -> float:
    at = bookings.free_time(START + after)
    assert bookings.add(Booking(at, 1.0, leaf_of(key), size, START + 100.0 + after), 100) is None
    return at


def test_a_booking_is_honored_by_another_worker_once() -> None:
    first, second, third = workers_of(3)
    add_booking(first, "a", 5.0)
    for other in (second, third):
        assert other.take(leaf_of("a"), 10, START + 4.9) is None, "too early"
        assert other.take(leaf_of("b"), 10, START + 5.0) is None, "another flow"
        assert other.take(leaf_of("a"), 11, START + 6.0) is None, "another body"
        assert other.take(leaf_of("a"), 10, START + 5.1 + RETURN_GRACE) is None, "too late"
    found = second.take(leaf_of("a"), 10, START + 5.0)
    assert found is not None and (found.at, found.deadline) == (START + 5.0, START + 105.0)
    for each in (second, third, first):
        assert each.take(leaf_of("a"), 10, START + 5.0) is None
    assert not len(first)


def test_the_bookings_of_a_worker_are_bounded_by_its_cells() -> None:
    [bookings] = workers_of(1, 258 + 3 * 5)
    flow = leaf_of("a")
    added = [bookings.add(Booking(START + after, 1.0, flow, 10, START), 100) for after in range(6)]
    assert [each is None for each in added] == [True] * 4 + [False] * 2 and len(bookings) == 4


@given(
    st.lists(st.tuples(st.sampled_from(["add", "take", "expire"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, 6)), max_size=80)
)
def test_each_booking_is_taken_at_most_once_and_from_any_worker(acts: list[tuple[str, int, int, int]]) -> None:
    workers, now, expected = workers_of(3), START, list[tuple[float, str]]()
    flows = [{key: leaf_of(key) for key in "abc"} for _ in workers]
    for act, number, flow, seconds in acts:
        now, key, bookings = now + seconds / 4, "abc"[flow], workers[number]
        expected = [each for each in expected if each[0] >= now - RETURN_GRACE]
        bookings.expire(now)
        if act == "add":
            at = now + seconds + len(expected) / 1000  # unique
            if all(at != each[0] for each in expected):
                bookings.add(Booking(at, 1.0, flows[number][key], 10, at), 100)
                expected.append((at, key))
        elif act == "take":
            due = [each for each in expected if each[1] == key and each[0] <= now]
            found = bookings.take(flows[number][key], 10, now)
            assert (found is None) == (not due)
            if found is not None:
                expected.remove((found.at, key))
        else:
            for each in workers:
                each.remove_honored()
                each.expire(now)
            assert sum(map(len, workers)) == len(expected)


@pytest.mark.parametrize("workers", [2, 4])
def test_a_client_returns_to_another_worker_and_has_its_place(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    key = Key("one")
    with simulated_workers(monkeypatch, workers, 1, Slo(), step=1.0, prefill=0.0) as simulated:
        first, other, clock = simulated[0], simulated[-1], simulated[0].clock
        for after in (0.0, 1.0):
            first.arrive(Client(key, output=5, ttft=100.0), after)
        first.arrive(Client(key, output=8), 10.5)
        clock.run(START + 11.0)
        refused = Client(key, size=2000, ttft=3.0, returns=0, body=1)
        first.send(refused)
        [attempt] = refused.attempts
        assert attempt.reason == "queue_predicted" and attempt.retry_after == 5
        clock.run(START + 16.0)
        # The first request of a worker has no prediction, so this one would wait. Its deadline is that of its booking.
        returned = Client(key, size=2000, ttft=3.0, returns=0, body=1)
        unhurried = Client(key, size=400, ttft=100.0, output=1)
        other.send(unhurried)
        clock.run(START + 16.1)
        other.send(returned)
        clock.run(START + 60.0)
        assert returned.served and returned.attempts[0].dispatched == 1018.5, "it is before the request that came first"
        assert unhurried.served
        assert first.queue._plan is not None and not len(first.queue._plan.bookings)


# Over sockets


def cells(one: Controlled, family: str, cell: int = 0) -> list[float]:
    """Return the sum of a cell of all series of a family in each worker."""
    return [sum(values[cell] for _, values in counters.readings(f'["{family}",')) for counters in one.control.workers.boards]


async def connected(one: Controlled, stack: AsyncExitStack) -> tuple[int, Connection]:
    """Open a connection, which stays with its worker. Return the number of the worker, too."""
    before, connection = cells(one, "requests_total"), await stack.enter_async_context(client(one.port))
    assert (await connection.request(request(chat(model="unknown"), token="sk-a"))).status == 404
    await until(lambda: cells(one, "requests_total") != before)
    return next(number for number, count in enumerate(cells(one, "requests_total")) if count != before[number]), connection


@pytest.mark.parametrize("workers", [2, 4])
async def test_a_client_returns_to_another_real_worker(tmp_path: Path, workers: int) -> None:
    under_way = list[asyncio.Event]()

    async def hold(talk: Conversation) -> None:
        if talk.request.head.startswith(b"GET"):  # a probe
            await talk.respond(b'{"object":"list","data":[]}')
            return
        under_way.append(asyncio.Event())
        await under_way[-1].wait()
        await talk.respond(COMPLETION)

    async with scripted(hold) as server, AsyncExitStack() as stack:
        bounded = {
            "id": "tiny",
            "max_inflight": workers,
            "slo": {"ttft": "10m"},
            "queue": {"size": 100, "wait": "10m"},
            "servers": [{"url": f"http://127.0.0.1:{server.port}"}],
        }
        keys = [{"id": "a", "hash": hash_of("sk-a")}]
        one = await stack.enter_async_context(controlled(tmp_path, bounded, keys=keys, workers=workers))
        connections = defaultdict[int, list[Connection]](list)
        while len(connections) < workers or min(map(len, connections.values())) < 4:
            worker, connection = await connected(one, stack)
            connections[worker].append(connection)
        own = connections.pop(0)
        for number, each in enumerate((own.pop(), *(of_worker.pop() for of_worker in connections.values())), 1):
            each.send(request(chat(seed=0), token="sk-a"))
            await until(lambda count=number: len(under_way) == count)
        second, third, refused = own[:3]
        others = list(chain.from_iterable(connections.values()))
        for seed, each in enumerate((second, third), 1):
            each.send(request(chat(seed=seed), token="sk-a"))
        await until(lambda: one.value("queued_requests", "tiny") == 2)
        under_way[0].set()
        await until(lambda: len(under_way) == workers + 1)  # from here on the worker knows the rate
        while not sum(cells(one, "queue_bookings", 1)):  # on a busy machine, a client may return too late
            reply = await refused.request(request(chat(seed=9), token="sk-a", extra=("x-vllm-gateway-ttft: 1ms",)))
            assert reply.status == 503
            await asyncio.sleep(int(reply.headers["retry-after"]))
            waiting = one.value("queued_requests", "tiny")
            others.pop().send(request(chat(seed=9), token="sk-a"))
            await until(lambda before=waiting: one.value("queued_requests", "tiny") > before)
        assert cells(one, "queue_bookings", 1)[0] == 0
        await until(lambda: one.value("queue_bookings", "tiny") == 0)
