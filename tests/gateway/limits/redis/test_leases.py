"""Leases in Redis: several gateways never admit more than the limits, and all of a lease is used, returned, or held by an open request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from time import monotonic, time
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.api.media_urls import InlineMedia
from gateway.api.settlement import Settlement
from gateway.api.usage import Usage
from gateway.limits import Limiter, Reservation
from gateway.limits.expected_use import estimate_request
from gateway.limits.lease import DURATION, LEAST, PARTS
from gateway.limits.redis.store import RedisStore
from gateway.limits.reservation import reservation_of
from gateway.limits.response_headers import reservation_lines
from gateway.limits.shared_counts import Buckets
from gateway.snapshot.snapshot import Allowance, Key, Limits, LimitsStore, Snapshot
from gateway.telemetry.metrics import WorkerMetrics, sum_series
from gateway.telemetry.shared_counters import SharedCounters
from tests.faults.chaos import CLEAR, Chaos, End, Weather, chaos
from tests.support.examples import examples
from tests.support.redis_server import RedisServer, counted, store_at
from tests.support.running import model, shared_counters, until

CHAT = "/v1/chat/completions"
MODELS = (model(1), model(2, identity="other"))
PLENTY = Limits(requests_per_minute=60_000, tokens_per_minute=6_000_000, tokens_per_day=10_000_000)


@dataclass
class Open:
    """An admitted request. ``tokens`` is what it has reserved."""

    reservation: Reservation
    tokens: int

    def finish(self, used: int, status: int = 200) -> None:
        """Settle the request with this usage."""
        self.reservation.settle(Settlement(Usage(prompt=used)), status)


@dataclass
class One:
    """One worker of a gateway, with its limits."""

    limiter: Limiter
    counters: SharedCounters
    snapshot: Snapshot
    names: Iterator[int] = field(default_factory=count)

    @property
    def store(self) -> RedisStore:
        assert self.limiter.store is not None
        return self.limiter.store

    async def start(self, tokens: int = 10, key: int = 0, model: int = 0) -> Open | None:
        """Start a request that reserves this many tokens. Returns None if it is refused."""
        reservation = reservation_of(self.limiter, self.snapshot.keys[key], f"req-{id(self)}-{next(self.names)}", {})
        try:
            if (waiting := reservation.reserve_request()) is not None:
                await waiting
            estimate_request(reservation, {"max_tokens": tokens - 1}, CHAT, 0, InlineMedia(), self.snapshot.models[model])
            if (waiting := reservation.reserve_tokens()) is not None:
                await waiting
        except Refusal:
            return None
        return Open(reservation, tokens)

    async def start_many(self, times: int, tokens: int = 10) -> list[Open]:
        """Start requests one after the other. Returns those that were admitted."""
        return [one for _ in range(times) if (one := await self.start(tokens)) is not None]

    async def lease(self) -> list[Open]:
        """Start requests until one is admitted from a lease. Returns all of them."""
        admitted, before = list[Open](), self.admitted("lease")
        async with asyncio.timeout(60):
            while self.admitted("lease") == before:
                admitted += await self.start_many(1)
        return admitted

    def admitted(self, source: str) -> float:
        """Return the requests that were admitted by ``call`` or ``lease``."""
        found = sum_series([self.counters]).items()
        return sum(values[0] for each, values in found if each.family == "limits_store_admissions_total" and each.labels == (source,))

    async def acknowledged(self) -> None:
        """Wait until the store has acknowledged all settlements."""
        async with asyncio.timeout(60):
            while self.store._unacknowledged:
                self.store.tick()
                await asyncio.sleep(0.005)

    async def return_leases(self) -> None:
        """End all leases, those that are not reserved yet included, and wait until the store has acknowledged it."""
        async with asyncio.timeout(60):
            while self.store._open_connection is None or self.store._open_connection._pending or self.store.leases._open:
                self.store.leases.end_all()
                self.store.tick()
                await asyncio.sleep(0.005)
        await self.acknowledged()


@asynccontextmanager
async def worker(limits_store: LimitsStore, *allowances: Allowance, keys: int = 1) -> AsyncIterator[One]:
    """Run the limits of a worker."""
    with shared_counters() as counters:
        limiter = Limiter(WorkerMetrics(counters), Buckets.private(), lambda _: None)
        found = tuple(Key(f"key-{number}", allowances=allowances) for number in range(keys))
        snapshot = Snapshot(1, found, MODELS, limits_store=limits_store)
        limiter.apply_snapshot(snapshot)
        try:
            yield One(limiter, counters, snapshot)
        finally:
            limiter.close()
            await asyncio.sleep(0)


@asynccontextmanager
async def workers(limits_store: LimitsStore, limits: Limits, number: int = 2) -> AsyncIterator[Sequence[One]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(worker(limits_store, Allowance("key a", limits))) for _ in range(number)]


def used_today(client: redis.Redis, holder: str = "key a") -> float:
    return float(client.hget(f"vllm-gateway:{holder}", "dt") or 0)


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 1), st.integers(1, 80), st.integers(1, 40)),
        st.tuples(st.just("finish"), st.integers(0, 1), st.integers(1, 80), st.sampled_from([0.0, 0.3, 1.0])),
        st.tuples(st.just("end"), st.integers(0, 1), st.just(0), st.just(0)),
    ),
    max_size=25,
)
_DAY, _MINUTE = 10_000, 2_000
"""Limits of tokens per day and of requests per minute."""


def test_two_gateways_with_leases_never_admit_more_than_the_limits(server: RedisServer) -> None:
    """The reserved and used amounts never exceed a limit, and without leases the last token is admitted, and no token more."""
    from_leases = list[float]()

    @settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(_STEPS)
    def check(steps: list[Any]) -> None:
        with server.client() as each:
            each.flushall()
        from_leases.append(asyncio.run(_run(server, steps)))

    check()
    assert sum(from_leases) > 0


async def _run(server: RedisServer, steps: list[Any]) -> float:
    """Run steps on two gateways. Returns the requests that were admitted from leases."""
    began, day = monotonic(), time() // 86400
    running, used, requests = [list[Open](), list[Open]()], 0, 0
    limits = Limits(requests_per_minute=_MINUTE, tokens_per_day=_DAY)
    async with workers(server.store_config(), limits) as both:
        for kind, number, times, what in [("start", 0, 1, 1), ("start", 1, 1, 1), *steps]:
            if kind == "start":
                admitted = await both[number].start_many(times, 1 + int(what))
                running[number] += admitted
                requests += len(admitted)
            elif kind == "finish":
                for one in running[number][:times]:
                    one.finish(int(one.tokens * what))
                    used += int(one.tokens * what)
                del running[number][:times]
            else:
                both[number].store.leases.end_all()
            taken = used + sum(one.tokens for each in running for one in each)
            assert taken <= _DAY and requests <= _MINUTE * (1 + (monotonic() - began + DURATION) / 60)
        for one in both:
            await one.return_leases()
        last = await both[0].start(_DAY - taken) if taken < _DAY else None
        exact = requests < _MINUTE / 2 and taken < _DAY - 1 and time() // 86400 == day
        assert last is not None or not exact
        assert not exact or await both[1].start(2) is None
        for each in (*running[0], *running[1], *([last] if last is not None else [])):
            each.finish(each.tokens)
            used += each.tokens
        for one in both:
            await one.return_leases()
        with server.client() as client:
            assert time() // 86400 != day or used_today(client) == used
            assert counted(client) in ([], [b"vllm-gateway:key a"]), "no reservation is left"
        return sum(one.admitted("lease") for one in both)


async def test_most_requests_of_a_busy_key_need_no_call(server: RedisServer) -> None:
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        async with asyncio.timeout(60):
            while one.admitted("lease") < 500:
                for each in await one.start_many(1):
                    each.finish(5)
        total = one.admitted("lease") + one.admitted("call")
        with server.client() as client:
            scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert scripts >= 2 * one.admitted("call"), "of each request, if the store decides about it"
            await one.return_leases()
            assert used_today(client) == 5 * total


@pytest.mark.parametrize("forgotten", [False, True], ids=["", "by a store that has forgotten the scripts"])
async def test_requests_that_outlive_their_lease_are_settled_by_their_usage(server: RedisServer, forgotten: bool) -> None:
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        running = await one.lease() + await one.start_many(5)
        with server.client() as client:
            if forgotten:
                client.script_flush()
                one.store.leases.end_all()
            else:
                await one.return_leases()
                assert used_today(client) == 10 * len(running), "what they have reserved"
            for each in running:
                each.finish(3)
                each.finish(3)
            await one.return_leases()
            assert used_today(client) == 3 * len(running)
            assert counted(client) == [b"vllm-gateway:key a"]


async def test_usage_beyond_a_lease_is_charged_at_once(server: RedisServer) -> None:
    """A request that has used more than it had reserved takes it from the lease first. The rest does not wait for the lease's end."""
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        running = await one.lease()
        running[-1].finish(1_000_000)
        await one.acknowledged()
        with server.client() as client:
            assert used_today(client) == 10 * (len(running) - 1) + 1_000_000


async def test_a_lease_ends_by_itself_and_is_returned(server: RedisServer) -> None:
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        running = await one.lease()
        with server.client() as client:
            assert used_today(client) > 10 * len(running)

            def is_returned() -> bool:
                one.limiter.tick()
                return used_today(client) == 10 * len(running)

            await until(is_returned)


async def test_a_lease_is_ended_before_a_request_of_its_holder_is_refused(server: RedisServer) -> None:
    """The own lease of a worker never makes it refuse a request."""
    async with worker(server.store_config(), Allowance("key a", Limits(tokens_per_day=10_000))) as one:
        running = await one.lease()
        rest = 10_000 - 10 * len(running)
        assert await one.start(rest + 1) is None
        assert await one.start(rest) is not None
        assert await one.start(1) is None


async def test_a_refusal_because_of_the_own_lease_is_not_remembered(server: RedisServer) -> None:
    """The refused request is admitted without the lease, and so is the next one."""
    async with workers(server.store_config(), Limits(requests_per_minute=600, tokens_per_day=10**7)) as (one, other):
        await one.lease()
        while await other.start() is not None:
            pass
        assert await one.start(50_000) is not None, "more than is left of the lease"
        assert await one.start() is not None


@pytest.mark.parametrize("limits", [Limits(concurrent=1000), Limits(requests_per_minute=200)], ids=["concurrent", "a small limit"])
async def test_requests_that_the_store_decides_about(server: RedisServer, limits: Limits) -> None:
    """A lease of a small limit would be too small: every request is a call, so refusals are exact."""
    async with worker(server.store_config(), Allowance("key a", replace(limits, tokens_per_day=10**9))) as one:
        await one.start_many(3 * LEAST)
        assert (one.admitted("lease"), one.admitted("call")) == (0, 3 * LEAST)


async def test_keys_of_a_team_lease_from_their_team(server: RedisServer) -> None:
    team = Allowance("team", Limits(tokens_per_day=10**6))
    async with worker(server.store_config(), team, Allowance("key a", PLENTY)) as one, worker(server.store_config(), team) as other:
        running = await one.lease() + await other.lease()
        for each in (one, other):
            await each.return_leases()
        with server.client() as client:
            assert used_today(client, "team") == 10 * len(running)


async def test_a_fallback_ends_the_lease_of_the_former_model(server: RedisServer) -> None:
    rows = [Allowance(f"key a for {each.id}", Limits(tokens_per_day=10**6), (each.id,)) for each in MODELS]
    async with worker(server.store_config(), *rows) as one:
        running = await one.lease()
        await one.acknowledged()
        moved = running[-1].reservation
        estimate_request(moved, {"max_tokens": 9}, CHAT, 0, InlineMedia(), MODELS[1])
        waiting = moved.reserve_tokens()
        assert waiting is not None
        await waiting
        moved.settle(Settlement(Usage(prompt=4)), 200)
        await one.acknowledged()
        with server.client() as client:
            assert used_today(client, f"key a for {MODELS[0].id}") == 10 * (len(running) - 1)
            assert used_today(client, f"key a for {MODELS[1].id}") == 4


async def test_headers_count_the_requests_of_a_lease(server: RedisServer) -> None:
    async with worker(server.store_config(), Allowance("key a", Limits(tokens_per_day=10**6))) as one:
        await one.lease()
        found = list[int]()
        for _ in range(3):
            each = await one.start(10)
            assert each is not None
            lines = dict(line.split(b": ") for line in reservation_lines(each.reservation).splitlines())
            found.append(int(lines[b"x-ratelimit-remaining-tokens-day"]))
        assert [before - after for before, after in pairwise(found)] == [10, 10]


async def test_shown_limits_are_without_the_lease(server: RedisServer) -> None:
    async with worker(server.store_config(), Allowance("key a", Limits(tokens_per_day=10**6))) as one:
        running = await one.lease()
        (state,) = await one.limiter.states(one.snapshot.keys[0], "shown")
        assert state.used == 10 * len(running)


@pytest.mark.parametrize("how", ["reload", "drain", "close"])
async def test_leases_are_returned(server: RedisServer, how: str) -> None:
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        running = await one.lease()
        with server.client() as client:
            assert used_today(client) > 10 * len(running)
            if how == "reload":
                one.limiter.apply_snapshot(replace(one.snapshot, version=2))
            elif how == "drain":
                one.limiter.stop_leases()
                before = one.admitted("lease")
                running += await one.start_many(3 * LEAST)
                assert one.admitted("lease") == before
            else:
                one.limiter.close()
            await until(lambda: used_today(client) == 10 * len(running))


async def test_a_killed_worker_loses_no_more_than_its_lease(server: RedisServer) -> None:
    """Its lease stays charged, like the reservations of its requests. The other worker is served."""
    async with workers(server.store_config(), PLENTY) as (one, other):
        running = await one.lease()
        (lease,) = one.store.leases._open.values()
        left = lease.tokens
        assert one.store._open_connection is not None
        one.store._open_connection.transport._transport.abort()  # and nothing is sent again
        with server.client() as client:
            await until(lambda: client.info("clients")["connected_clients"] <= 2)
            assert used_today(client) == 10 * len(running) + left
            assert left <= 10_000_000 / PARTS
            later = await other.start_many(5)
            assert len(later) == 5
            assert used_today(client) == 10 * (len(running) + 5) + left


@pytest.mark.parametrize("refuses", [False, True])
async def test_leases_end_when_the_store_stops_responding(server: RedisServer, refuses: bool) -> None:
    """Requests are then counted as configured. When the store is back, it gets what was used, and nothing twice."""
    async with worker(server.store_config(timeout=1.0, refuses=refuses), Allowance("key a", PLENTY)) as one:
        running = await one.lease()
        server.signal(signal.SIGSTOP)
        try:
            waits = asyncio.create_task(one.start(100_000))  # more than is left of the lease

            def is_unavailable() -> bool:
                one.limiter.tick()
                return one.store._is_available is False

            await until(is_unavailable)
            assert (await waits is None) is refuses
            before = one.admitted("lease")
            assert (await one.start() is None) is refuses
            assert one.admitted("lease") == before
            for each in running:
                each.finish(4)
        finally:
            server.signal(signal.SIGCONT)
        await one.acknowledged()
        with server.client() as client:
            assert used_today(client) == 4 * len(running)
            assert counted(client) == [b"vllm-gateway:key a"]


async def test_a_lease_of_which_the_store_knows_nothing_is_worth_nothing(server: RedisServer) -> None:
    """A store that restarts without its data grants again: each lease ends with the connection."""
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        await one.lease()
        server.stop()
        server.start()
        await until(lambda: not one.store.leases._open)


async def test_usage_is_exact_wherever_a_connection_is_cut(server: RedisServer) -> None:
    """Cut in the replies to admissions of requests and leases, and to settlements of both: what was admitted counts as what it used."""
    cuts = range(700, 4000, 110)

    async def one(network: Chaos, number: int) -> tuple[str, int, float]:
        """Return the holder, the tokens that its requests used, and the requests that were admitted from leases."""
        holder = f"key {number}"
        limits_store = store_at(network.port, timeout=0.9, refuses=True)
        async with worker(limits_store, Allowance(holder, PLENTY)) as each:
            finished = 0
            running = list[Open]()
            while finished < 3 * LEAST:
                if (started := await each.start()) is None:
                    each.limiter.tick()
                    await asyncio.sleep(0.02)
                    continue
                running.append(started)
                if len(running) == LEAST:
                    finished += len(running) - 1
                    for other in running[:-1]:
                        other.finish(7)
                    running = running[-1:]
                    each.store.leases.end_all()
            running[0].finish(7)
            await each.acknowledged()
            return holder, 7 * (finished + 1), each.admitted("lease")

    def weather(number: int) -> Weather:
        return Weather(cut_at=cuts[number], end=End.RESET) if number < len(cuts) else CLEAR

    async with chaos(server.port, weather) as network:
        found = await asyncio.gather(*(one(network, number) for number in range(len(cuts))))
    assert sum(leased for _, _, leased in found) > 0
    with server.client() as client:
        assert [used_today(client, holder) for holder, _, _ in found] == [used for _, used, _ in found]
        assert [name for name in counted(client) if name.startswith(b"vllm-gateway:reserved")] == []


async def test_a_lease_continues_after_its_requests(server: RedisServer) -> None:
    async with worker(server.store_config(), Allowance("key a", PLENTY)) as one:
        running = await one.lease()
        (lease,) = one.store.leases._open.values()
        for each in running:
            each.finish(5)
        assert list(one.store.leases._open.values()) == [lease]


async def test_headers_show_the_requests_that_the_store_has_counted(server: RedisServer) -> None:
    async with worker(server.store_config(), Allowance("key a", Limits(requests_per_minute=3, tokens_per_minute=1000))) as one:
        each = await one.start(10)
        assert each is not None
        lines = dict(line.split(b": ") for line in reservation_lines(each.reservation).splitlines())
        assert (lines[b"x-ratelimit-limit-requests"], lines[b"x-ratelimit-remaining-requests"]) == (b"3", b"2")
