"""Which server a pool gives, and what a reload leaves as it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.pools import pool_of
from tests.support.running import until
from tests.support.scripted import Conversation, scripted
from upstream.balancing.attempt import Attempt
from upstream.balancing.ejection import FIRST_PAUSE
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.pool import LiveServers, NoServerError, live_servers
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import Deadlines, Timeouts
from upstream.http.errors import ConnectFailed


def spec(name: str, port: int = 1, **more: Any) -> ServerSpec:
    return ServerSpec(name, Address(port=port), "m", **more)


def servers(*conditions: Condition) -> list[Server]:
    return [Server(spec(f"s{n}"), condition) for n, condition in enumerate(conditions)]


REFUSED = ConnectFailed("x", "refused")
SHARED = RequestFacts(affinity_key=7)
UP, DOWN, LOADING = Condition.UP, Condition.DOWN, Condition.LOADING


@pytest.mark.parametrize("balance", POLICIES)
async def test_only_those_that_are_up(balance: str) -> None:
    each = servers(UP, DOWN, LOADING, UP)
    pool = pool_of(each, balance)
    assert {pool.choose().spec.name for _ in range(10)} == {"s0", "s3"}


@pytest.mark.parametrize(("conditions", "loading"), [((), False), ((DOWN,), False), ((LOADING,), True), ((DOWN, LOADING), True)])
async def test_none_is_up(conditions: tuple[Condition, ...], loading: bool) -> None:
    pool = pool_of(servers(*conditions), "least_busy")
    with pytest.raises(NoServerError) as caught:
        pool.choose()
    assert caught.value.loading is loading
    assert pool.less_busy_of_two() is None


async def test_an_ejected_or_tried_server_is_chosen_only_if_no_other_is_left() -> None:
    a, b = servers(UP, UP)
    pool = pool_of([a, b], "least_busy")
    a.record_failure(REFUSED)
    assert {pool.choose() for _ in range(4)} == {b}
    assert pool.choose([b]) is a, "it refused a moment ago, but the other was tried"
    b.record_failure(REFUSED)
    assert {pool.choose() for _ in range(4)} == {a, b}
    assert pool.choose([a, b]) in (a, b)
    assert pool_of([a], "least_busy").choose([a]) is a


async def test_busyness_goes_by_weight() -> None:
    light, heavy = Server(spec("light"), UP), Server(spec("heavy", weight=3.0), UP)
    pool = pool_of([light, heavy], "least_busy")
    for _ in range(40):
        pool.choose().start_exchange()
    assert (light.in_flight, heavy.in_flight) == (10, 30)


async def test_the_mirror_follows_what_is_in_flight() -> None:
    (one,) = servers(UP)
    cells, others = [3.0], [0.0]  # three are in flight on a former server of this name
    one.publish_in_flight(cells)
    one.start_exchange()
    one.start_exchange()
    assert cells == [5.0]
    one.publish_in_flight(others)
    assert (cells, others) == ([3.0], [2.0])
    one.retire()
    one.finish_exchange()
    assert others == [1.0], "what a retired one still does is counted"
    one.finish_exchange()
    assert (cells, others, one.in_flight) == ([3.0], [0.0], 0)


async def test_a_reload_keeps_what_did_not_change() -> None:
    servers = LiveServers()
    before = dict(servers.reconcile([spec("a"), spec("b"), spec("c")]))
    servers.set_condition("a", UP)
    servers.set_condition("nobody", UP)
    before["a"].start_exchange()
    after = servers.reconcile([spec("d"), spec("a"), spec("b", port=2)])
    assert list(after) == ["d", "a", "b"] == [server.spec.name for server in servers]
    assert after["a"] is before["a"] and (after["a"].in_flight, after["a"].condition) == (1, UP)
    assert after["b"] is not before["b"], "another address is another server"
    assert after["b"].condition is LOADING


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_of_an_older_snapshot_is_not_sent_to_a_removed_server(count: int) -> None:
    old, new = pool_of(servers(*[UP] * count), "least_busy"), pool_of([Server(spec("new"), UP)], "least_busy")
    old.retire()
    assert old.choose() in old.servers, "the model was removed, and its requests may finish"
    old.successor = new
    assert old.choose() is old.choose(old.servers) is new.servers[0]


async def test_a_removed_server_has_no_idle_connections() -> None:
    responding = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await responding.wait()
        await talk.respond(b"{}")

    async with scripted(script) as upstream:
        with live_servers() as live:
            one = live.reconcile([spec("a", upstream.port, keep_idle=60.0)])["a"]
            one.condition = UP

            async def request() -> None:
                with Attempt(pool_of([one], "least_busy"), Timeouts(), Deadlines()) as attempt:
                    response = await attempt.send(lambda _: (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b""))
                    await response.wait_complete()

            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(request())
                await until(lambda: len(upstream.requests) == 2)
                responding.set()
            assert upstream.accepted == upstream.open == 2, "idle ones are kept"
            responding.clear()
            async with asyncio.TaskGroup() as group:
                group.create_task(request())
                await until(lambda: len(upstream.requests) == 3)
                live.reconcile([replace(one.spec, model="other")])
                await until(lambda: upstream.open == 1)
                responding.set()
            await until(lambda: upstream.open == 0)


async def test_a_key_is_not_shown() -> None:
    secret = spec("a", api_key="sesame")
    assert "sesame" not in repr(secret)
    assert repr(Server(secret, UP)) == "<Server a up, 0 in flight, 0 idle>"


async def test_requests_with_one_affinity_key_go_to_one_server_while_it_is_available() -> None:
    each = servers(UP, UP, UP)
    pool = pool_of(each, "prefix")
    assert [one.required_facts for one in (pool, pool_of(each, "least_busy"), pool_of(each[:1], "prefix"))] == [
        {"affinity_key"},
        set(),
        set(),
    ]
    chosen = {key: pool.choose(request=RequestFacts(key)) for key in range(50)}
    assert set(chosen.values()) == set(each)
    assert all(pool.choose(request=RequestFacts(key)) is server for key, server in chosen.items())
    first = chosen[7]
    second = pool.choose([first], request=SHARED)
    assert second is not first
    first.record_failure(REFUSED)
    assert pool.choose(request=SHARED) is second
    second.condition = DOWN
    assert {pool.choose(request=SHARED)} == set(each) - {first, second}


async def test_a_request_without_an_affinity_key_goes_to_the_least_busy_server() -> None:
    busy, idle = servers(UP, UP)
    busy.start_exchange()
    assert {pool_of([busy, idle], "prefix").choose() for _ in range(10)} == {idle}


async def test_a_frequent_affinity_key_does_not_fill_one_server() -> None:
    each = servers(UP, UP, UP, UP)
    pool = pool_of(each, "prefix")
    for _ in range(100):
        pool.choose(request=SHARED).start_exchange()
    assert sorted(server.in_flight for server in each)[-1] <= 32


# Servers that are given only so many requests at once


def bounded(*limits: float) -> list[Server]:
    each = servers(*([UP] * len(limits)))
    for server, limit in zip(each, limits, strict=True):
        server.limit = limit
    return each


@pytest.mark.parametrize("balance", POLICIES)
@pytest.mark.parametrize("limits", [(2,), (2, 3), (1, 2, 4)])
async def test_none_has_more_than_it_is_given_and_all_of_it_is_used(balance: str, limits: tuple[int, ...]) -> None:
    each = bounded(*limits)
    pool = pool_of(each, balance)
    for _ in range(sum(limits)):
        assert pool.has_capacity()
        pool.choose(request=SHARED).start_exchange()
    assert [server.in_flight for server in each] == list(limits) and not pool.has_capacity()
    with pytest.raises(NoServerError) as caught:
        pool.choose(request=SHARED)
    assert caught.value.full and not caught.value.loading
    each[-1].finish_exchange()
    assert pool.has_capacity() and pool.choose(request=SHARED) is each[-1]


async def test_queued_requests_are_notified_of_capacity() -> None:
    a, b = bounded(1, 1)
    pool, notified = pool_of([a, b], "least_busy"), []
    pool.on_capacity(lambda: notified.append(pool.has_capacity()))
    for server in (a, b):
        server.start_exchange()
    assert notified == []
    b.finish_exchange()
    assert notified == [True]
    b.start_exchange()
    a.condition = DOWN
    a.finish_exchange()
    assert not any(notified[1:])
    a.condition = UP
    assert notified[-1]
    pool.retire()
    del notified[:]
    b.finish_exchange()
    assert notified == [], "the next snapshot has another pool"


async def test_a_queued_request_is_resumed_when_the_last_server_is_ejected_too() -> None:
    ejected, full = bounded(1, 1)
    pool, reported = pool_of([ejected, full], "least_busy"), []
    ejected.record_failure(REFUSED)
    full.start_exchange()
    assert not pool.has_capacity()
    pool.on_capacity(lambda: reported.append(pool.has_capacity()))
    full.record_failure(REFUSED)
    assert reported == [True] and pool.choose() is ejected


async def test_an_ejected_server_is_not_chosen_because_the_others_are_full() -> None:
    a, b = bounded(2, 1)
    pool = pool_of([a, b], "least_busy")
    b.start_exchange()
    a.record_failure(REFUSED)
    assert not pool.has_capacity()
    for tried in ([], [a], [b]):
        with pytest.raises(NoServerError):
            pool.choose(tried)
    b.finish_exchange()
    assert pool.choose([a]) is b
    b.record_failure(REFUSED)
    assert pool.has_capacity() and pool.choose() in (a, b), "all have refused, and none is full"


@pytest.mark.parametrize("balance", POLICIES)
async def test_if_all_servers_are_ejected_those_with_capacity_are_used(balance: str) -> None:
    each = bounded(1, 1, 1, 1)
    pool = pool_of(each, balance)
    each[0].start_exchange()
    for server in each:
        server.record_failure(REFUSED)
    assert pool.has_capacity()
    for _ in range(3):
        chosen = pool.choose(request=SHARED)
        assert not chosen.full
        chosen.start_exchange()
    assert not pool.has_capacity()
    with pytest.raises(NoServerError) as caught:
        pool.choose(request=SHARED)
    assert caught.value.full
    each[2].finish_exchange()
    assert pool.has_capacity() and pool.choose() is each[2]


async def test_a_full_server_is_not_chosen_for_a_second_attempt() -> None:
    a, b, c = bounded(2, 1, 1)
    pool = pool_of([a, b, c], "round_robin")
    b.start_exchange()
    c.start_exchange()
    assert {pool.choose([a]) for _ in range(3)} == {a}, "it was tried, and is the only one with room"
    c.finish_exchange()
    assert {pool.choose([a]) for _ in range(3)} == {c}


# Ejection


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_an_ejection_ends_at_its_time_and_the_pool_uses_the_server_again() -> None:
    clock = Clock()
    first, second = Server(spec("s0"), UP, clock=clock), Server(spec("s1"), UP, clock=clock)
    pool = pool_of([first, second], "least_busy")
    first.record_failure(REFUSED)
    assert (first.is_ejected, first.available, first.ejected_cells[0]) == (True, False, 1.0)
    first.expire()
    assert (first.is_ejected, first.ejected_cells[0]) == (True, 1.0), "it has not expired"
    assert {pool.choose() for _ in range(4)} == {second}
    clock.now += FIRST_PAUSE
    assert (first.is_ejected, first.available) == (False, True)
    assert {pool.choose() for _ in range(4)} == {second}, "the ranking follows when the ejection is found to have expired"
    first.expire()
    assert first.ejected_cells[0] == 0.0
    assert {pool.choose() for _ in range(4)} == {first, second}


async def test_a_server_with_only_reserved_slots_is_available_for_the_first_class() -> None:
    server = Server(spec("s0"), UP)
    server.limit = 2
    server.reserve((1,))
    assert server.available_for(1)
    server.start_exchange(1)
    assert (server.available, server.available_for(1)) == (True, False)


async def test_only_a_server_that_comes_up_forgets_its_failures() -> None:
    clock = Clock()
    one = Server(spec("s0"), UP, clock=clock)
    one.record_failure(REFUSED)
    for condition, is_ejected in ((UP, True), (LOADING, True), (DOWN, True), (UP, False)):
        one.condition = condition
        assert one.is_ejected is is_ejected, condition


async def test_a_retired_server_no_longer_shows_its_ejection() -> None:
    one, cells = Server(spec("s0"), UP), [0.0]
    one.ejected_cells = cells
    one.record_failure(REFUSED)
    assert cells == [1.0]
    one.retire()
    assert cells == [0.0]
    cells[0] = 5.0  # of another server with this name
    one.record_success()
    assert cells == [5.0]


async def test_an_expired_idle_connection_is_closed() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(b"{}")

    async with scripted(script) as upstream:
        one = Server(spec("a", upstream.port, keep_idle=0.01), UP)
        with Attempt(pool_of([one], "least_busy"), Timeouts(), Deadlines()) as attempt:
            response = await attempt.send(lambda _: (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b""))
            await response.wait_complete()
        await asyncio.sleep(0.02)
        assert upstream.open == 1
        one.expire()
        await until(lambda: upstream.open == 0)


@pytest.mark.parametrize(
    ("in_flight", "of_later", "tier", "serves"),
    [(2, 2, 0, True), (3, 3, 0, False), (2, 1, 1, True), (2, 2, 1, False), (2, 2, 5, False)],
    ids=["full", "above its limit", "in a slot for later ones", "in a reserved slot", "of a tier without a reservation of its own"],
)
async def test_a_preemption_helps_only_if_the_request_can_have_the_slot(in_flight: int, of_later: int, tier: int, serves: bool) -> None:
    server = Server(ServerSpec("s", Address(port=1), "m"), Condition.UP)
    server.limit = 2
    server.reserve((1,))
    for number in range(in_flight):
        server.start_exchange(int(number < of_later))
    assert server.would_serve(tier) is serves
    server.condition = Condition.DOWN
    assert not server.would_serve(tier)
