"""Limits counted in Redis: the same decisions as in memory, and the behavior while Redis is unavailable."""

from __future__ import annotations

import asyncio
import logging
import signal
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from math import inf
from time import monotonic, sleep, time
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import ResponseError

from gateway.limits.decision import SIZE, Amounts, Holder, admit
from gateway.limits.redis.scripts import Script, load_scripts, source
from gateway.limits.redis.store import RedisStore, StoreUnavailableError, seconds_ahead
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import SLICES, BudgetState, moment, month_of
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Allowance, Budget, Limits, LimitsStore, Queue
from tests.faults.chaos import CLEAR, Chaos, End, Weather, chaos
from tests.support.examples import examples
from tests.support.ports import refusing, silent
from tests.support.process import wait_for
from tests.support.redis_server import RedisServer, counted, store_at
from tests.support.running import Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, COUNT, DONE, HELLO, ROLE, STOP, Client, Reply, chat, client, request, request_once
from upstream.balancing.server import Condition

LIMITS = Limits(
    requests_per_minute=6,
    tokens_per_minute=90,
    tokens_per_day=400,
    tokens_per_week=450,
    tokens_per_month=500,
    cost_per_day=3_000_000_000,
    cost_per_week=4_000_000_000,
    cost_per_month=5_000_000_000,
    concurrent=4,
    budgets=(Budget("30d", 30 * 86400, 350, 2_500_000_000), Budget("7d", 7 * 86400, tokens=100, soft=True)),
)


@asynccontextmanager
async def opened(
    store_config: LimitsStore, worker: str = "a worker", on_change: Callable[[str | None], None] = lambda _: None
) -> AsyncIterator[RedisStore]:
    store = RedisStore(store_config, worker, on_change)
    try:
        yield store
    finally:
        store.close()
        await asyncio.sleep(0)


FAULTS = {"READONLY": "READONLY", "OOM": "OOM", "MISCONF": "MISCONF", "NOPERM": "The user executing the script can't"}
"""Why a store rejects writes, with a part of its error."""


@contextmanager
def rejected_writes(server: RedisServer, fault: str) -> Iterator[None]:
    """Let the server reject writes with this error for the length of the block. It still accepts connections and reads."""
    with server.client() as each, refusing() as port:
        match fault:
            case "READONLY":
                each.replicaof("127.0.0.1", port)
            case "OOM":
                each.config_set("maxmemory", 1)
            case "MISCONF":  # it cannot save to its folder
                server.folder.chmod(0o555)
                each.config_set("save", "3600 1")
                each.set("unsaved", 1)
                each.bgsave()
                wait_for(lambda: each.info("persistence")["rdb_last_bgsave_status"] == "err")
            case "NOPERM":
                each.acl_setuser("default", enabled=True, commands=["-hset"])
        try:
            yield
        finally:
            each.replicaof("NO", "ONE")
            each.config_set("maxmemory", 0)
            each.config_set("save", "")
            server.folder.chmod(0o777)
            each.acl_setuser("default", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all"])


def ticking(store: RedisStore, condition: Callable[[], Any]) -> Callable[[], bool]:
    """Return a condition that calls the store's clock each time it is checked."""

    def holds() -> bool:
        store.tick()
        return bool(condition())

    return holds


_SLICES = st.lists(st.tuples(st.integers(0, 26), st.integers(0, 120), st.integers(0, 10**9)), max_size=6)
"""The age of a slice of a rolling window in slices, with its tokens and cost."""
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 120), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from([0.0, 0.3, 1.0, 1.5])),
        st.tuples(st.just("split"), st.integers(0, 5), st.sampled_from([0.0, 0.3, 1.0])),
    ),
    max_size=25,
)


def test_the_store_decides_as_the_memory_does(server: RedisServer) -> None:
    """Compare both for two holders: they admit the same requests, and the same limit refuses with the same wait.

    A reservation may be split like a lease that ends while a request is open: one part is settled, the other one later.
    """

    @settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(_STEPS, _SLICES)
    def check(steps: list[Any], slices: list[tuple[int, int, int]]) -> None:
        with server.client() as each:
            each.flushall()
        asyncio.run(_compare(server, steps, slices))

    check()


def _count_earlier(server: RedisServer, buckets: Buckets, one: Holder, slices: list[tuple[int, int, int]]) -> None:
    """Count the same slices in the rolling window of 30 days of both."""
    (window,) = [each for each in one.windows if each.name == "30d"]
    with server.client() as each:
        for age, tokens, cost in slices:
            number = int(time() // window.slice_seconds) - age
            slot = number % (SLICES + 1)
            start = window.start + 3 * slot
            buckets.cells[start], buckets.cells[start + 1], buckets.cells[start + 2] = number, tokens, cost
            each.hset("vllm-gateway:key one", f"30d:{slot}", f"{number} {tokens} {cost}")


async def _compare(server: RedisServer, steps: list[Any], slices: list[tuple[int, int, int]]) -> None:
    """Compare the decisions of both. Each uses its own clock, so after half a second one may have a token more: the comparison stops."""
    buckets, began = Buckets.private(), monotonic()
    one, both = buckets.holder("key one", LIMITS), buckets.holder("team", Limits(requests_per_minute=9, tokens_per_day=700))
    running: list[Any] = []
    _count_earlier(server, buckets, one, slices)
    async with opened(server.store_config()) as store:
        for number, (kind, amount, what) in enumerate(steps):
            if kind == "come":
                at, identity = moment(monotonic(), time()), str(number)
                wanted = [(holder, Amounts(1, 1, amount, amount * 20_000_000)) for holder in ((one, both) if what else (one,))]
                end_times: dict[int, float] = {}
                expected, decision = buckets.reserve(wanted, at, end_times), await store.admit(identity, wanted)
                if monotonic() - began > 0.5:
                    return
                assert (decision.exceeded and decision.exceeded[1].reason) == (expected and expected[1].reason)
                states = [(holder, state) for holder, _ in wanted for state in buckets.budget_states(holder, moment(monotonic(), time()))]
                assert [_without_reset(each) for each in decision.budgets] == [_without_reset(each) for each in states]
                assert [state.reset for _, state in decision.budgets] == pytest.approx([state.reset for _, state in states], abs=2)
                if decision.exceeded is None:
                    running.append((identity, wanted, at, end_times))
                elif expected is not None and expected[1].wait is not None:
                    assert decision.exceeded[1].wait == pytest.approx(expected[1].wait, abs=2)
                    assert decision.exceeded[1].requested == expected[1].requested
                    assert decision.exceeded[1].left == pytest.approx(expected[1].left, abs=3)
            elif running and kind == "split":
                identity, wanted, at, end_times = running.pop(amount % len(running))
                tokens, cost = int(wanted[0][1].tokens * what), int(wanted[0][1].cost * what)
                released = [(holder, Amounts(each.requests, each.slots, tokens, cost)) for holder, each in wanted]
                rest = [(holder, Amounts(0, 0, each.tokens - tokens, each.cost - cost)) for holder, each in wanted]
                used = Amounts(1, 0, tokens // 2, cost // 2)
                buckets.settle(released, end_times, used, at, monotonic())
                store.settle(identity, released, used, (f"open-{identity}",))
                running.append((f"open-{identity}", rest, at, end_times))
            elif running:
                identity, wanted, at, end_times = running.pop(amount % len(running))
                used = Amounts(wanted[0][1].requests, 0, int(wanted[0][1].tokens * what), int(wanted[0][1].cost * what))
                buckets.settle(wanted, end_times, used, at, monotonic())
                store.settle(identity, wanted, used)


def _without_reset(one: tuple[Holder, BudgetState]) -> tuple[Holder, BudgetState]:
    return one[0], msgspec.structs.replace(one[1], reset=0.0)


_SIZES = st.floats(0, 9).map(lambda exponent: round(10**exponent))
"""Rates and amounts, of each order of magnitude alike."""
_WAITS = st.builds(lambda exponent, sign: sign * 10**exponent, st.floats(-2.5, 2), st.sampled_from([1, 1, -1]))
"""Seconds until a request is admitted; negative: since when it is."""
_RATES = st.lists(st.tuples(_SIZES, _SIZES, _SIZES, _WAITS, _WAITS), min_size=1, max_size=20)


def test_the_store_and_the_memory_decide_alike_about_rates_and_waits_of_all_sizes(server: RedisServer) -> None:
    @settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(_RATES)
    def check(rates: list[tuple[int, int, int, float, float]]) -> None:
        with server.client() as each:
            each.flushall()
        asyncio.run(_compare_rates(server, rates))

    check()


async def _compare_rates(server: RedisServer, rates: list[tuple[int, int, int, float, float]]) -> None:
    """Compare the store's decision with those of the memory at a moment before and at a moment after it, by the store's own clock."""
    async with opened(server.store_config()) as store:
        with server.client() as each:
            for number, (requests, tokens, amount, *waits) in enumerate(rates):
                holder = Holder.placed(f"key {number}", Limits(requests_per_minute=requests, tokens_per_minute=tokens))
                wanted, before = [(holder, Amounts(1, 1, amount))], _now(each)
                needed = 60 / requests, 60 * min(amount / tokens, 1)
                full = [before + 60 - seconds + wait for seconds, wait in zip(needed, waits, strict=True)]
                each.hset(f"vllm-gateway:key {number}", mapping=dict(zip("rt", map(repr, full), strict=True)))
                decision = (await store.admit(str(number), wanted)).exceeded
                early, late = (admit(wanted, [*full, *[0.0] * (SIZE - 1)], moment(now, now), {}) for now in (before, _now(each)))
                if early is None or decision is None:
                    assert late is None and decision is None, "time only refills"
                elif late is not None and early[1].reason == late[1].reason:
                    assert early[1].wait is not None and late[1].wait is not None and decision[1].wait is not None
                    assert decision[1].reason == early[1].reason and decision[1].requested == early[1].requested
                    assert late[1].wait - 1e-3 <= decision[1].wait <= early[1].wait + 2e-3
                    assert early[1].left * (1 - 1e-6) - 1 <= decision[1].left <= late[1].left * (1 + 1e-6) + 1


def _now(client: Any) -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


@pytest.mark.parametrize(
    ("age", "forgotten"), [(90, 0), (90, 600), (40, 0)], ids=["", "by a meter that was forgotten meanwhile", "in less than a minute"]
)
async def test_tokens_refilled_by_time_are_not_released_again(server: RedisServer, age: int, forgotten: int) -> None:
    """Time has refilled a reservation of some time ago, so its settlement releases nothing. A new reservation is released."""
    wanted = [(Holder.placed("key a", Limits(requests_per_minute=2, tokens_per_minute=1000)), Amounts(1, 0, 400))]
    with server.client() as each:
        async with opened(server.store_config()) as store:
            for name in ("r1", "r2"):
                assert (await store.admit(name, wanted)).exceeded is None
            written = "vllm-gateway:reserved a worker", "r1 vllm-gateway:key a"
            at, *end_times = map(float, each.hget(*written).split())
            aged = at - age, *(end + forgotten - age for end in end_times)
            each.hset(*written, " ".join(map(repr, aged)))
            before = [float(value) for value in each.hmget("vllm-gateway:key a", "r", "t")]
            store.settle("r1", wanted, Amounts())
            assert (await store.admit("r3", [(wanted[0][0], Amounts())])).exceeded is None
            assert [float(value) for value in each.hmget("vllm-gateway:key a", "r", "t")] == before
            store.settle("r2", wanted, Amounts())
            assert (await store.admit("r4", [(wanted[0][0], Amounts())])).exceeded is None
            found = [float(value) for value in each.hmget("vllm-gateway:key a", "r", "t", "rb", "tb")]
            assert found == pytest.approx([before[0] - 30, before[1] - 24, 30, 24], abs=1e-3)


def test_the_calendar_of_the_store(server: RedisServer) -> None:
    script = source("calendar") + "local m = month_of(tonumber(ARGV[1])) return {m, first_day_of(m)}"
    days = [number for year in range(1970, 2470, 3) for number in range(_day(year, 2, 27), _day(year, 3, 3))]
    days += range(_day(2026, 1, 1), _day(2028, 1, 1), 2)
    with server.client() as each:
        pipeline = each.pipeline(transaction=False)
        for day in days:
            pipeline.eval(script, 0, day)
        found = pipeline.execute()
    for day, (month, first) in zip(days, found, strict=True):
        assert month == month_of(day)
        assert date(1970, 1, 1) + timedelta(first) == (date(1970, 1, 1) + timedelta(day)).replace(day=1)


@pytest.mark.parametrize(("window", "days"), [("day", 1), ("week", 3), ("month", 28)])
def test_the_end_of_a_period_of_the_store(server: RedisServer, window: str, days: int) -> None:
    """The day 20,000 is Friday, 2024-10-04."""
    script = source("calendar") + source("common") + "now = tonumber(ARGV[1]) return seconds_left(ARGV[2])"
    with server.client() as each:
        assert each.eval(script, 0, 20_000 * 86400 + 10, window) == days * 86400 - 10


def _day(year: int, month: int, day: int) -> int:
    return (date(year, month, day) - date(1970, 1, 1)).days


async def test_the_latest_other_day_is_remembered(server: RedisServer) -> None:
    """Compare with the memory: a clock that is set back and forward again between two requests forgets the older day."""
    holder, today = Holder.placed("key a", Limits(tokens_per_day=10)), int(datetime.now(UTC).timestamp() // 86400)
    with server.client() as each:
        each.hset("vllm-gateway:key a", mapping={"d": today - 2, "dt": 7, "dn": 0, "od": today - 1, "odt": 3, "odn": 0})
        async with opened(server.store_config()) as store:
            assert (await store.admit("r1", [(holder, Amounts(1, 1, 4))])).exceeded is None
        stored = each.hgetall("vllm-gateway:key a")
    now = int(datetime.now(UTC).timestamp() // 86400)
    if now == today:  # otherwise midnight passed during the test
        assert [float(stored[name]) for name in (b"d", b"dt", b"od", b"odt")] == [today, 4, today - 1, 3]


_COSTS = Limits(cost_per_day=300_000_000, cost_per_month=10**15)


async def _reserve_and_settle(store: RedisStore, name: str, cost: int) -> bool:
    """Reserve a cost and settle it as used. Returns whether it was admitted."""
    wanted = [(Holder.placed("key a", _COSTS), Amounts(1, 1, 1, cost))]
    if (await store.admit(name, wanted)).exceeded is not None:
        return False
    store.settle(name, wanted, Amounts(1, 0, 1, cost))
    return True


async def test_costs_are_exact(server: RedisServer) -> None:
    """Three requests of a cost of 0.1 fit into a limit of 0.3."""
    async with opened(server.store_config()) as store:
        assert [await _reserve_and_settle(store, f"r{number}", 100_000_000) for number in range(4)] == [True, True, True, False]
    with server.client() as each:
        assert each.hmget("vllm-gateway:key a", "dn", "mn") == [b"300000000", b"300000000"]


async def test_large_costs_are_exact(server: RedisServer) -> None:
    """Up to the largest limit, and what is left of it."""
    holder = Holder.placed("key a", Limits(cost_per_month=9 * 10**15))
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", [(holder, Amounts(1, 1, 1, 9 * 10**15 - 7))])).exceeded is None
        refused = (await store.admit("r2", [(holder, Amounts(1, 1, 1, 8))])).exceeded
        assert refused is not None and (refused[1].left, refused[1].requested) == (7, 8)
        assert (await store.admit("r3", [(holder, Amounts(1, 1, 1, 7))])).exceeded is None


async def test_a_reply_that_waits_to_be_read_is_not_late(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Accept a reply that this process reads late, for example on a busy machine."""
    holder = Holder.placed("key a", Limits(requests_per_minute=10))
    limits_store = server.store_config(timeout=0.25)
    async with opened(limits_store) as store:
        assert (await store.admit("r1", [(holder, Amounts(1, 1, 0))])).exceeded is None
        admission = asyncio.create_task(store.admit("r2", [(holder, Amounts(1, 1, 0))]))
        await asyncio.sleep(0)
        sleep(2 * limits_store.timeout)  # noqa: ASYNC251  # the event loop is blocked
        store.tick()
        assert (await admission).exceeded is None
    assert caplog.text == ""


async def test_replies_of_the_store(server: RedisServer) -> None:
    holder = Holder.placed("key a", Limits(tokens_per_month=10, tokens_per_minute=600))
    async with opened(LimitsStore(path=str(server.socket_path), database=3)) as store:
        before = monotonic()
        decision = await store.admit("r1", [(holder, Amounts(1, 1, 10))])
        after, now = monotonic(), datetime.now(UTC)
        assert before + 0.9 < decision.full_times[0][2] < after + 1.1
        decision = await store.admit("r2", [(holder, Amounts(1, 1, 1))])
        assert decision.exceeded is not None and decision.exceeded[1].reason == "tokens_per_month"
    with server.client() as each:
        each.execute_command("SELECT", 3)
        assert each.hget("vllm-gateway:key a", "m") == str(now.year * 12 + now.month - 1).encode()
        assert [each.ttl(name) > 86400 for name in each.scan_iter()] == [True] * 3, "every key ends by itself"


async def test_a_store_that_has_forgotten_the_scripts_gets_them_again(server: RedisServer) -> None:
    holder = Holder.placed("key a", Limits(requests_per_minute=100, concurrent=1))
    wanted = [(holder, Amounts(1, 1))]
    async with opened(server.store_config()) as store:
        for number in range(3):
            decision = await store.admit(f"r{number}", wanted)
            assert decision.exceeded is None
            with server.client() as each:
                each.script_flush()
            store.settle(f"r{number}", wanted, Amounts(1))


async def test_requests_do_not_wait_for_an_unavailable_store() -> None:
    holder = Holder.placed("key a", Limits(requests_per_minute=100))
    async with opened(store_at(1)) as store:
        for number in range(3):
            with pytest.raises(StoreUnavailableError):
                await store.admit(f"r{number}", [(holder, Amounts(1, 1))])


async def test_an_abandoned_request_that_was_refused_releases_nothing(server: RedisServer) -> None:
    wanted, other = ([(Holder.placed(name, Limits(tokens_per_day=10)), Amounts(1, 1, 10))] for name in ("key a", "key b"))
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", wanted)).exceeded is None
        abandoned = asyncio.create_task(store.admit("r2", wanted))
        await asyncio.sleep(0)
        abandoned.cancel()
        assert (await store.admit("r3", other)).exceeded is None, "replies arrive in the order of their commands"
        assert abandoned.cancelled() and store._settled == 0


async def test_a_server_that_is_no_store_is_unavailable() -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    reported: list[str | None] = []
    async with (
        await asyncio.start_server(respond, "127.0.0.1", 0) as other,
        opened(store_at(other.sockets[0].getsockname()[1]), on_change=reported.append) as store,
    ):
        with pytest.raises(StoreUnavailableError):
            await store.admit("r1", [(Holder.placed("key a", Limits(requests_per_minute=100)), Amounts(1, 1))])
    assert len(reported) == 1 and str(reported[0]).startswith("it sent an invalid reply: ")


async def test_a_store_that_accepts_no_connection_is_unavailable_after_its_timeout() -> None:
    reported: list[str | None] = []
    with silent() as port:
        async with opened(store_at(port, timeout=0.05), on_change=reported.append) as store:
            admission = asyncio.create_task(store.admit("r1", [(Holder.placed("key a", Limits(requests_per_minute=100)), Amounts(1, 1))]))

            def responded() -> bool:
                store.tick()
                return admission.done()

            await until(responded)
            assert isinstance(admission.exception(), StoreUnavailableError) and reported == ["it does not respond"]
        assert asyncio.all_tasks() == {asyncio.current_task()}, "the attempt to connect has ended too"


async def test_what_is_retained_for_an_unavailable_store_is_bounded() -> None:
    """Settle more requests than are retained, each of another holder: the latest stay."""
    buckets, limits = Buckets.private(), Limits(tokens_per_day=100)
    async with opened(store_at(1)) as store:
        for number in range(10_001):
            store.settle(f"r{number}", [(buckets.holder(f"key {number}", limits), Amounts(1, 1))], Amounts(1, 0, 7))
        commands = [command for command, _ in store._unacknowledged.values()]
        assert all(f":key {number}\r\n".encode() in command for number, command in enumerate(commands, 1)) and len(commands) == 10_000
        assert len(store._by_holder) <= 10_000


async def test_a_change_of_state_is_reported_once_and_without_the_password(server: RedisServer) -> None:
    reported: list[str | None] = []
    async with opened(server.store_config(), on_change=reported.append) as store:
        await store.admit("r1", [(Holder.placed("key a", Limits(requests_per_minute=100)), Amounts(1, 1))])
        assert reported == [None]
    echo = b"-ERR unknown command 'AUTH', with args beginning with: 'a-password'\r\n"

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(echo)
        await reader.read()
        writer.close()

    reported.clear()
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as odd:
        limits_store = store_at(odd.sockets[0].getsockname()[1], password="a-password")
        async with opened(limits_store, on_change=reported.append) as store:
            for number in range(3):
                with pytest.raises(StoreUnavailableError):
                    await store.admit(f"r{number}", [(Holder.placed("key a", Limits(requests_per_minute=100)), Amounts(1, 1))])
    assert reported == ["ERR unknown command 'AUTH', with args beginning with: '…'"]


def test_the_clock_of_the_store_is_derived_from_the_local_clock() -> None:
    """Bound the clock by a reply: its time belongs to a moment between sending the command and reading the reply."""
    ahead = seconds_ahead(-inf, 1000.4, sent=10.0, now=11.0)
    assert 10.0 + ahead == pytest.approx(999.4), "never too late"
    ahead = seconds_ahead(ahead, 1010.1, sent=20.0, now=20.3)
    assert 20.0 + ahead == pytest.approx(1009.8), "what a quick one says is nearer"
    ahead = seconds_ahead(ahead, 1020.1, sent=30.0, now=35.0)
    assert 30.0 + ahead == pytest.approx(1019.8), "a slow one knows no better"
    ahead = seconds_ahead(ahead, 1090.1, sent=40.0, now=40.1)
    assert 40.0 + ahead == pytest.approx(1090.0), "it was set forward"
    ahead = seconds_ahead(ahead, 1050.0, sent=50.0, now=51.0)
    assert 50.0 + ahead == pytest.approx(1050.0), "it was set back"


async def test_a_clock_that_is_set_forward_is_used_at_once(server: RedisServer) -> None:
    wanted = [(Holder.placed("key a", Limits(tokens_per_day=100, concurrent=1)), Amounts(1, 1, 10))]
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", wanted)).exceeded is None
        store.settle("r1", wanted, Amounts(1, 0, 5))
        store._ahead -= 3600  # as if the clock of the store had been an hour behind until now
        assert (await store.admit("r2", wanted)).exceeded is None
    with server.client() as each:
        assert each.hget("vllm-gateway:key a", "dt") == b"15"


async def test_leases_are_renewed_after_the_clock_is_set_forward(server: RedisServer) -> None:
    """Renew them even if no other request uses the store in the meantime."""
    wanted = [(Holder.placed("key a", Limits(concurrent=1)), Amounts(1, 1, 10))]
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", wanted)).exceeded is None
        store._ahead -= 3600  # as if the clock of the store had been an hour behind until now
        with server.client() as each:
            before = each.zscore("vllm-gateway:key a leases", "r1") or 0
            async with asyncio.timeout(30):
                while (each.zscore("vllm-gateway:key a leases", "r1") or 0) <= before:
                    store._renewed = 0.0  # the next renewal is due
                    store.tick()
                    await asyncio.sleep(0.02)


async def test_nothing_is_reserved_for_a_gateway_that_has_stopped(server: RedisServer) -> None:
    """Ignore its requests that still wait in the socket, because no process would release them."""
    wanted = [(Holder.placed("key a", Limits(tokens_per_day=100, concurrent=5)), Amounts(1, 1, 10))]
    async with opened(server.store_config(timeout=1.0)) as store:
        assert (await store.admit("r1", wanted)).exceeded is None
        server.signal(signal.SIGSTOP)
        try:
            admission = asyncio.create_task(store.admit("r2", wanted))
            while not admission.done():
                store.tick()
                await asyncio.sleep(0.02)
            assert isinstance(admission.exception(), StoreUnavailableError)
            store.close()
            await asyncio.sleep(0.02)
        finally:
            server.signal(signal.SIGCONT)
    with server.client() as each:
        await until(lambda: each.info("clients")["connected_clients"] == 1)
        assert each.hget("vllm-gateway:key a", "dt") == b"10"
        assert b"r2" not in each.zrange("vllm-gateway:key a leases", 0, -1)


async def test_counts_are_right_wherever_a_connection_is_cut(server: RedisServer) -> None:
    """Cut before, in and after the replies to both scripts: an admitted request counts as the tokens it used, any other as nothing."""
    cuts = range(120, 300, 3)

    async def one(network: Chaos, number: int) -> tuple[str, float]:
        """Return the holder and its used tokens after the store has received them."""
        wanted = [(Holder.placed(f"key {number}", Limits(tokens_per_day=1000, concurrent=1)), Amounts(1, 1, 900))]
        async with opened(store_at(network.port, timeout=10), f"worker {number}") as store:
            try:
                assert (await store.admit("r1", wanted)).exceeded is None
            except StoreUnavailableError:
                used = 0
            else:
                used = 7
                store.settle("r1", wanted, Amounts(1, 0, used))
            await acknowledged(store)
        return f"vllm-gateway:key {number}", used

    def weather(number: int) -> Weather:
        return Weather(cut_at=cuts[number], end=End.RESET) if number < len(cuts) else CLEAR

    async with chaos(server.port, weather) as network:
        found = await asyncio.gather(*(one(network, number) for number in range(len(cuts))))
    assert {used for _, used in found} == {0, 7}
    with server.client() as each:
        assert [float(each.hget(holder, "dt") or 0) for holder, _ in found] == [used for _, used in found]
        assert [name for name in each.scan_iter() if name.startswith(b"vllm-gateway:reserved")] == []
        assert [name for name in each.scan_iter() if name.endswith(b"leases")] == []


async def acknowledged(store: RedisStore) -> None:
    """Wait until the store has acknowledged all settlements."""
    async with asyncio.timeout(60):
        while store._unacknowledged:
            store.tick()
            await asyncio.sleep(0.02)


async def test_a_lost_settlement_is_sent_again(server: RedisServer) -> None:
    wanted = [(Holder.placed("key a", Limits(tokens_per_day=1000)), Amounts(1, 1, 900))]
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", wanted)).exceeded is None
        assert store._open_connection is not None
        store._open_connection.transport.abort()
        store.settle("r1", wanted, Amounts(1, 0, 7))
        await acknowledged(store)
    with server.client() as each:
        assert each.hget("vllm-gateway:key a", "dt") == b"7"


@pytest.mark.parametrize(
    ("full", "free"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["full", "a replica"],
)
async def test_a_settlement_that_the_store_cannot_write_is_sent_again(
    server: RedisServer, full: tuple[str, ...], free: tuple[str, ...]
) -> None:
    wanted = [(Holder.placed("key a", Limits(tokens_per_day=1000)), Amounts(1, 1, 900))]
    with server.client() as each:
        async with opened(server.store_config()) as store:
            assert (await store.admit("r1", wanted)).exceeded is None
            each.execute_command(*full)
            try:
                store.settle("r1", wanted, Amounts(1, 0, 7))
                await until(lambda: store._open_connection is None)
                with pytest.raises(StoreUnavailableError):
                    await store.admit("r2", wanted)
                assert len(store._unacknowledged) == 1, "and nothing of what it has not taken"
            finally:
                each.execute_command(*free)
            await acknowledged(store)
        assert each.hget("vllm-gateway:key a", "dt") == b"7"


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_store_that_rejects_writes_is_down_until_a_write_succeeds(server: RedisServer, fault: str) -> None:
    """The store accepts connections, scripts and TIME meanwhile."""
    reported: list[str | None] = []
    wanted = [(Holder.placed("key a", Limits(tokens_per_day=1000)), Amounts(1, 0, 1))]
    async with opened(server.store_config(), on_change=reported.append) as store:
        assert (await store.admit("r1", wanted)).exceeded is None
        with rejected_writes(server, fault), server.client() as each:
            with pytest.raises(StoreUnavailableError):
                await store.admit("r2", wanted)
            attempts = each.info("stats")["total_connections_received"]

            await until(ticking(store, lambda: each.info("stats")["total_connections_received"] > attempts + 2), 60)
            assert reported[0] is None and all(FAULTS[fault] in str(reason) for reason in reported[1:])
        await until(ticking(store, lambda: store._open_connection is not None), 60)
        assert (await store.admit("r3", wanted)).exceeded is None
    assert reported.count(None) == 2 and reported[-1] is None


async def test_an_idle_store_that_begins_to_reject_writes_is_noticed(server: RedisServer) -> None:
    """A failover happens when no request is there to notice it."""
    reported: list[str | None] = []
    async with opened(server.store_config(), on_change=reported.append) as store:
        await until(ticking(store, lambda: reported == [None]), 60)
        with rejected_writes(server, "READONLY"):
            await until(ticking(store, lambda: len(reported) > 1), 60)
        assert str(reported[1]).startswith("READONLY")


async def test_a_settlement_that_the_store_rejects_is_sent_once(server: RedisServer) -> None:
    """Drop it: otherwise it would block all other settlements."""
    wanted = [(Holder.placed(name, Limits(tokens_per_day=1000)), Amounts(1, 1, 900)) for name in ("key a", "key b")]
    with server.client() as each:
        async with opened(server.store_config()) as store:
            for identity, reservation in zip(("r1", "r2"), wanted, strict=True):
                assert (await store.admit(identity, [reservation])).exceeded is None
            each.set("vllm-gateway:key a", "what somebody else has put here")
            for identity, reservation in zip(("r1", "r2"), wanted, strict=True):
                store.settle(identity, [reservation], Amounts(1, 0, 7))
            await acknowledged(store)
        assert each.hget("vllm-gateway:key b", "dt") == b"7"


# Behind a worker


@pytest.mark.parametrize("refuses", [False, True])
async def test_limits_are_shown_from_memory_or_not_at_all_without_the_store(refuses: bool) -> None:
    with refusing() as port:
        async with gateway(store_at(port, refuses=refuses), tokens_per_day=500) as served:
            reply = await request_once(served.port, request(b"", "/v1/limits").replace(b"POST", b"GET"))
    if refuses:
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
    else:
        assert [(each["limit"], each["used"]) for each in orjson.loads(reply.body)["limits"]] == [("tokens_per_day", 0)]


async def test_limits_of_a_model_are_shown_from_memory_without_the_store() -> None:
    one = key(allowances=(Allowance("key team-a for tiny", Limits(requests_per_minute=5), ("tiny",)),))
    with refusing() as port:
        async with scripted(respond) as upstream, serving([model(upstream.port)], [one], limits_store=store_at(port)) as served:
            reply = await request_once(served.port, request(chat()))
    assert (reply.status, reply.headers["x-ratelimit-limit-requests"]) == (200, "5")


async def test_a_store_that_stops_before_a_fallback_delays_it_by_nothing(server: RedisServer) -> None:
    """The request has reserved in the store for its first model. No reservation for the second model is made in memory."""
    rows = tuple(Allowance(f"key team-a for {name}", Limits(tokens_per_day=5000), (name,)) for name in ("tiny", "other"))
    async with scripted(respond) as upstream:
        models = [model(1, fallbacks=("other",), queue=Queue(size=1, wait=30.0)), model(upstream.port, identity="other")]
        async with serving(models, [key(allowances=rows)], limits_store=server.store_config(), up=False) as served:
            served.worker.apply_health(Health({"tiny#0": Condition.LOADING, "other#0": Condition.UP}, {}, {"tiny": monotonic() + 300}))
            queued = asyncio.create_task(request_once(served.port, request(chat(max_tokens=1))))
            await until(lambda: served.value("queued_requests", "tiny") == 1)
            server.stop()
            try:
                served.worker.apply_health(Health({"tiny#0": Condition.DOWN, "other#0": Condition.UP}, {}))
                assert (await queued).status == 200
            finally:
                server.start()
            buckets = served.context.limiter.buckets
            states = buckets.budget_states(buckets.holder("key team-a for other", rows[1].limits), moment(monotonic(), time()))
            assert [state.used for state in states] == [0]


async def respond(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        for each in (ROLE, HELLO):
            await talk.chunk(each)
        await talk.closed_by_peer()
    else:
        await talk.respond(COMPLETION)


@asynccontextmanager
async def gateway(store_config: LimitsStore, **limits: Any) -> AsyncIterator[Served]:
    allowance = Allowance("key team-a", Limits(**limits))
    async with (
        scripted(respond) as upstream,
        serving([model(upstream.port)], [key(allowances=(allowance,))], limits_store=store_config) as served,
    ):
        yield served


async def statuses(served: Served, times: int) -> list[int]:
    return [(await request_once(served.port, request(chat(max_tokens=1)))).status for _ in range(times)]


async def test_two_workers_count_together(server: RedisServer) -> None:
    async with gateway(server.store_config(), requests_per_minute=5) as one, gateway(server.store_config(), requests_per_minute=5) as two:
        began = monotonic()
        assert await statuses(one, 3) == [200] * 3
        assert await statuses(two, 3) == [200, 200, 429]
        reply = await request_once(one.port, request(chat()))
        assert (reply.status, reply.headers["x-ratelimit-remaining-requests"]) == (429, "0")
        assert 12 - (monotonic() - began) <= int(reply.headers["retry-after"]) <= 12


async def test_an_exhausted_limit_refuses_before_the_body(server: RedisServer) -> None:
    async with gateway(server.store_config(), requests_per_minute=1, tokens_per_minute=1000) as served:
        assert await statuses(served, 2) == [200, 429]
        async with client(served.port) as visitor:
            visitor.send(request(b"").replace(b"content-length: 0", b"content-length: 1000"))
            reply = await visitor.reply()
        assert reply.status == 429 and int(reply.headers["retry-after"]) <= 60
        assert reply.headers["x-ratelimit-limit-tokens"] == "1000"


async def test_an_exhausted_limit_that_a_reload_changes_admits_again(server: RedisServer) -> None:
    """Admit requests again after a reload has raised or removed the limit."""
    async with gateway(server.store_config(), requests_per_minute=1, tokens_per_minute=1000) as served:
        assert await statuses(served, 2) == [200, 429]
        for version, requests in enumerate((600_000, None), 2):
            allowance = Allowance("key team-a", Limits(requests_per_minute=requests, tokens_per_minute=1000))
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=version, keys=(key(allowances=(allowance,)),)))
            async with asyncio.timeout(30):  # the raised limit starts from the used amount, which is a full minute's
                while await statuses(served, 1) != [200]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await statuses(served, 2) == [200, 200]


@pytest.mark.parametrize("gone", [False, True], ids=["", "and without limits for a while"])
async def test_a_reload_keeps_the_reservations_in_the_store(server: RedisServer, gone: bool) -> None:
    """Keep the store when only `on_store_failure` changes: leases are renewed, and pending settlements are sent."""
    async with gateway(server.store_config(), concurrent=1, tokens_per_day=5000) as served:
        with server.client() as each:
            async with client(served.port) as visitor:
                visitor.send(request(chat(max_tokens=1, stream=True)))
                await until(lambda: each.zcard("vllm-gateway:key team-a leases") == 1)
                ((lease, expiry),) = each.zrange("vllm-gateway:key team-a leases", 0, -1, withscores=True)
                before = served.worker.snapshot
                if gone:
                    served.worker.apply_snapshot(replace(before, version=2, keys=(key(),)))
                served.worker.apply_snapshot(replace(before, version=3, limits_store=server.store_config(refuses=True)))
                await until(lambda: (each.zscore("vllm-gateway:key team-a leases", lease) or 0) > expiry)
            await until(lambda: each.zcard("vllm-gateway:key team-a leases") == 0)
        server.stop()
        try:
            assert await statuses(served, 1) == [503], "by the new word"
        finally:
            server.start()


async def test_a_reload_removes_the_store_while_a_body_is_received(server: RedisServer) -> None:
    """Release in memory only the amounts that were reserved in memory."""
    async with gateway(server.store_config(), concurrent=1, tokens_per_day=5000) as served:
        async with client(served.port) as visitor:
            data = request(chat(max_tokens=1))
            visitor.send(data[:-1])
            await until(lambda: served.context.started == 1)
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, limits_store=None))
            visitor.send(data[-1:])
            assert (await visitor.reply()).status == 200
        buckets = served.context.limiter.buckets
        assert buckets.in_flight(buckets.holder("key team-a", Limits())) == 0


async def test_a_reload_removes_the_store_before_a_fallback(server: RedisServer) -> None:
    rows = tuple(Allowance(f"key team-a for {name}", Limits(tokens_per_day=5000), (name,)) for name in ("tiny", "other"))
    async with scripted(respond) as upstream:
        models = [model(1, fallbacks=("other",), queue=Queue(size=1, wait=30.0)), model(upstream.port, identity="other")]
        async with serving(models, [key(allowances=rows)], limits_store=server.store_config(), up=False) as served:
            served.worker.apply_health(Health({"tiny#0": Condition.LOADING, "other#0": Condition.UP}, {}, {"tiny": monotonic() + 300}))
            queued = asyncio.create_task(request_once(served.port, request(chat(max_tokens=1))))
            await until(lambda: served.value("queued_requests", "tiny") == 1)
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, limits_store=None))
            served.worker.apply_health(Health({"tiny#0": Condition.DOWN, "other#0": Condition.UP}, {}))
            assert (await queued).status == 200


async def test_tokens_are_settled_in_the_store(server: RedisServer) -> None:
    async with gateway(server.store_config(), tokens_per_day=500, concurrent=1) as served:
        assert await statuses(served, 4) == [200] * 4
        with server.client() as each:
            await until(lambda: each.hget("vllm-gateway:key team-a", "dt") == b"20")
            assert counted(each) == [b"vllm-gateway:key team-a"], "nothing is left of what they had reserved"
        assert served.in_flight == 0


async def test_a_fallback_is_counted_as_itself(server: RedisServer) -> None:
    limits = Limits(tokens_per_day=50_000, concurrent=1)
    rows = tuple(Allowance(f"key team-a for {name}", limits, (name,)) for name in ("tiny", "other"))
    one = key(allowances=(Allowance("key team-a", limits), *rows))
    with refusing() as closed_port:
        async with scripted(respond) as upstream:
            models = [model(closed_port, fallbacks=("other",)), model(upstream.port, identity="other")]
            async with serving(models, [one], limits_store=server.store_config()) as served:
                assert await statuses(served, 3) == [200] * 3
                with server.client() as each:
                    for holder, tokens in (("key team-a", b"15"), ("key team-a for tiny", b"0"), ("key team-a for other", b"15")):
                        await until(lambda holder=holder, tokens=tokens: each.hget(f"vllm-gateway:{holder}", "dt") == tokens)
                        assert not each.exists(f"vllm-gateway:{holder} leases")


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_store_that_stops_and_starts_again(server: RedisServer, refuses: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(server.store_config(refuses=refuses), requests_per_minute=3) as served:
        assert await statuses(served, 4) == [200, 200, 200, 429]
        server.stop()
        try:
            if refuses:
                replies = [await request_once(served.port, request(chat())) for _ in range(3)]
                refusals = [(reply.status, reply.error["code"], reply.headers["retry-after"]) for reply in replies]
                assert refusals == [(503, "overloaded", "1")] * 3
                assert served.value("limited_total", "team-a", "store") == 3
            else:
                assert await statuses(served, 5) == [200, 200, 200, 429, 429], "each gateway by itself"
        finally:
            server.start()
        await until(lambda: "is available again" in caplog.text, 30)
        assert await statuses(served, 4) == [200, 200, 200, 429], "this one has forgotten everything"
        assert [record.levelno for record in caplog.records if record.name == "vllm_gateway.limits"] == [logging.WARNING] * 2


async def test_a_store_that_hangs_delays_only_one_request(server: RedisServer) -> None:
    limits_store, took = server.store_config(timeout=0.25), list[float]()
    async with gateway(limits_store, requests_per_minute=1000) as served:
        assert await statuses(served, 1) == [200]
        server.signal(signal.SIGSTOP)
        try:
            assert await asyncio.wait_for(statuses(served, 1), 20) == [200]
            for _ in range(9):
                began = monotonic()
                assert await statuses(served, 1) == [200]
                took.append(monotonic() - began)
        finally:
            server.signal(signal.SIGCONT)
        assert statistics.median(took) < limits_store.timeout, "they did not wait for it"
        with server.client() as each:
            before = float(each.hget("vllm-gateway:key team-a", "r") or 0)

            async def counted_again() -> bool:
                await statuses(served, 1)
                return float(each.hget("vllm-gateway:key team-a", "r") or 0) > before + 0.05

            async with asyncio.timeout(30):
                while not await counted_again():  # noqa: ASYNC110
                    await asyncio.sleep(0.2)


async def test_a_client_that_disconnects_during_admission_releases_its_reservation(server: RedisServer) -> None:
    async with chaos(server.port, Weather(delay=0.05)) as network:
        limits_store = store_at(network.port)
        async with gateway(limits_store, requests_per_minute=10, concurrent=2) as served:
            assert await statuses(served, 1) == [200]
            passed = network.passed
            async with client(served.port) as visitor:
                visitor.send(request(chat()))
                await until(lambda: served.context.started == 2)
            await until(lambda: network.passed > passed and served.in_flight == 0)
            with server.client() as each:
                await until(lambda: each.exists("vllm-gateway:key team-a leases") == 0)
            assert [record.status for record in served.context.records][-1] == 499
            await until(lambda: not served.context.limiter.store._slot_leases)  # type: ignore[union-attr]


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_stall_of_the_store_loses_no_counts(server: RedisServer, refuses: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Run the commands that wait in the socket when the store resumes.

    Two streams are admitted before the stall. One finishes while its settlement is still written to the socket, the other after the
    store is known to be unavailable.
    """
    end, holder = [asyncio.Event(), asyncio.Event()], "vllm-gateway:key team-a"

    async def respond_in_time(talk: Conversation) -> None:
        if not talk.request.json.get("stream"):
            await talk.respond(COMPLETION)
            return
        await talk.begin_stream()
        for each in (ROLE, HELLO):
            await talk.chunk(each)
        await end[int(str(talk.request.json["user"]))].wait()
        for each in (STOP, COUNT, DONE):
            await talk.chunk(each)
        await talk.end_stream()

    async def streamed(visitor: Client, number: int) -> Reply:
        return await visitor.request(request(chat(stream=True, user=str(number), max_tokens=300)))

    allowance = Allowance("key team-a", Limits(tokens_per_day=50_000, concurrent=20))
    limits_store = server.store_config(timeout=2.0, refuses=refuses)
    async with scripted(respond_in_time) as upstream:
        one = key(allowances=(allowance,))
        async with (
            serving([model(upstream.port)], [one], limits_store=limits_store) as served,
            client(served.port) as a,
            client(served.port) as b,
        ):
            assert await statuses(served, 1) == [200]
            streams = [asyncio.create_task(streamed(visitor, number)) for number, visitor in enumerate((a, b))]
            with server.client() as each:
                await until(lambda: each.zcard(f"{holder} leases") == 2)
            server.signal(signal.SIGSTOP)
            try:
                end[0].set()
                pending = [request_once(served.port, request(chat(max_tokens=300))) for _ in range(6)]
                ended, *replies = await asyncio.wait_for(asyncio.gather(streams[0], *pending), 60)
                assert ended.status == 200 and {reply.status for reply in replies} == {503 if refuses else 200}
                end[1].set()
                assert (await asyncio.wait_for(streams[1], 30)).status == 200
            finally:
                server.signal(signal.SIGCONT)
            await until(lambda: "is available again" in caplog.text, 60)
            with server.client() as each:
                await until(lambda: each.info("clients")["connected_clients"] == 2, 60)  # it has read the commands of all other connections
                await until(lambda: counted(each) == [holder.encode()], 60)  # the settlements have arrived
                assert float(each.hget(holder, "dt") or 0) == 3 * 5
            assert await statuses(served, 1) == [200]


# The scripts themselves


def replied(server: RedisServer, script: Script, keys: list[str], *arguments: str) -> list[float]:
    """Run a script, and return the numbers of its reply."""
    with server.client() as each:
        text = each.eval(script.text, len(keys), *keys, *arguments)
    assert isinstance(text, bytes)
    return [float(number) for number in text.split()]


def admitted(server: RedisServer, limits: str = "10 1000 0", amounts: str = "5 1 0 0", name: str = "key a") -> list[float]:
    """Reserve amounts of one holder, given as the script has them. See admit.lua."""
    keys = [f"vllm-gateway:{name}", f"vllm-gateway:{name} slots", "vllm-gateway:reserved"]
    return replied(server, load_scripts()["admit"], keys, "r1", f"30 {time() + 60}", limits, amounts)


def test_a_request_that_is_too_late_gets_the_time_of_the_store(server: RedisServer) -> None:
    before = time()
    code, _, _, now = replied(server, load_scripts()["admit"], ["vllm-gateway:reserved"], "r1", "30 1.5")
    assert code == -1 and before - 1 <= now / 1e6 <= time() + 1


def test_the_store_replies_with_the_time_until_its_buckets_are_full(server: RedisServer) -> None:
    refused, _, _, _, _, _, requests, tokens = admitted(server)
    assert refused == 0 and 30_000 <= requests <= 30_001 and tokens == 0
    refused, _, _, _, _, _, _, tokens = admitted(server, amounts="0 0 500 0")
    assert refused == 0 and 30_000 <= tokens <= 30_001
    began, requests, tokens = replied(server, load_scripts()["read"], ["vllm-gateway:key a"], "")
    assert began == 0 and 0 < requests <= 30_000 and 0 < tokens <= 30_001


@pytest.mark.parametrize(("window", "days"), [("day", 2), ("week", 14), ("month", 62)])
def test_counts_are_stored_for_longer_than_their_window(server: RedisServer, window: str, days: int) -> None:
    assert admitted(server, f"0 0 0 {window} 0 100 0 100 0", "1 1 5 0")[0] == 0
    with server.client() as each:
        assert each.ttl("vllm-gateway:key a") > days * 86400


def test_a_rolling_window_without_use_needs_no_time(server: RedisServer) -> None:
    for amounts, used in (("1 1 0 0", False), ("1 1 0 0", False), ("1 1 5 0", True), ("1 1 0 0", True)):
        *_, tokens, cost, wait = admitted(server, "0 0 0 7d 25200 100 0 100 0", amounts)
        assert (tokens, cost, wait > 0) == (5 if used else 0, 0, used)


def test_slots_of_a_gateway_that_has_died_are_released_for_each_holder(server: RedisServer) -> None:
    names = ["one", "two", "three"]
    with server.client() as each:
        for name in names:
            each.zadd(f"vllm-gateway:{name} slots", {"of a dead gateway": 1.0})
    keys = [key for name in names for key in (f"vllm-gateway:{name}", f"vllm-gateway:{name} slots")]
    arguments = [text for _ in names for text in ("0 0 1", "1 1 0 0")]
    found = replied(server, load_scripts()["admit"], [*keys, "vllm-gateway:reserved"], "r1", f"30 {time() + 60}", *arguments)
    assert found[0] == 0


def test_a_slot_is_held_until_its_request_is_settled_or_its_lease_ends(server: RedisServer) -> None:
    slots = "vllm-gateway:key a slots"
    found = admitted(server, "0 0 1", "1 1 0 0")
    assert found[0] == 0
    with server.client() as each:
        assert each.zscore(slots, "r1") == pytest.approx(found[3] / 1e6 + 30, abs=1e-3)
        assert 30 <= each.ttl(slots) <= 31
        keys = ["vllm-gateway:key a", slots, "vllm-gateway:reserved"]
        assert each.eval(load_scripts()["settle"].text, len(keys), *keys, "r1", "", "0 0") == b"OK"
        assert not each.exists(slots)


def test_counts_of_rates_are_stored_until_they_are_full(server: RedisServer) -> None:
    assert admitted(server, "10 1000 0", "5 1 0 0")[0] == 0
    with server.client() as each:
        assert 120 < each.ttl("vllm-gateway:key a") <= 151


def test_a_week_begins_on_monday(server: RedisServer) -> None:
    before = time()
    found = admitted(server, "0 0 0 week 0 100 0 100 0", "1 1 5 0")
    week = int((before // 86400 + 3) // 7)
    if (int(time() // 86400) + 3) // 7 == week:  # otherwise it ended during the test
        with server.client() as each:
            assert each.hget("vllm-gateway:key a", "w") == str(week).encode()
        assert found[-1] / 1000 == pytest.approx((week * 7 + 4) * 86400 - before, abs=60)


def test_a_day_ends_at_midnight(server: RedisServer) -> None:
    before = time()
    found = admitted(server, "0 0 0 day 0 100 0 100 0", "1 1 5 0")
    left = 86400 - before % 86400
    if left > 60:  # otherwise midnight may pass during the test
        assert found[-1] / 1000 == pytest.approx(left, abs=60)


def test_a_store_that_rejects_writes_of_hashes_is_not_opened(server: RedisServer) -> None:
    script, keys = load_scripts()["open"].text, ("store", "hash", "set")
    with server.client() as each:
        each.eval(script, len(keys), *keys)
        each.execute_command("ACL", "SETUSER", "default", "-hset")
        try:
            with pytest.raises(ResponseError):
                each.eval(script, len(keys), *keys)
        finally:
            each.execute_command("ACL", "SETUSER", "default", "+hset")


def test_a_renewal_extends_the_leases_by_their_seconds(server: RedisServer) -> None:
    with server.client() as each:
        before = time()
        (now,) = [int(each.eval(load_scripts()["renew"].text, 2, "one", "two", "30", f"{before + 60}", "r1", "r2"))]
        scores = each.zscore("one", "r1"), each.zscore("two", "r2")
        assert scores == (pytest.approx(now / 1e6 + 30, abs=1e-3),) * 2
        assert 30 <= each.ttl("one") <= 31
        each.eval(load_scripts()["renew"].text, 1, "one", "3000", f"{before - 60}", "r1")
        assert each.zscore("one", "r1") == scores[0], "it is too late"


_WINDOWS_OF_DAY_AND_RING = "day 0 7d 25200"


def restored(server: RedisServer, *used: str) -> None:
    with server.client() as each:
        assert each.eval(load_scripts()["restore"].text, 1, "vllm-gateway:key a", _WINDOWS_OF_DAY_AND_RING, *used) == b"OK"


def used_of(server: RedisServer) -> list[float]:
    """Return whether earlier use was added, then the tokens and the cost of the day and of the ring."""
    found = replied(server, load_scripts()["read"], ["vllm-gateway:key a"], _WINDOWS_OF_DAY_AND_RING)
    return [found[0], *found[3:5], *found[6:8]]


def test_earlier_use_is_added_once(server: RedisServer) -> None:
    now = time()
    day, slot = int(now // 86400), int(now // 25200)
    limits = "0 0 0 day 0 100 0 100 100 7d 25200 100 0 100 100"
    assert admitted(server, limits, "1 1 5 2")[0] == 0
    found = [used_of(server)]
    for _ in range(2):
        restored(server, f"1 {day} 10 4", f"2 {slot} 10 4", f"2 {slot - 3} 7 1", f"2 {slot - 30} 7 1")
        found.append(used_of(server))
    restored(server, f"1 {day} 12 4", f"2 {slot} 11 3")
    found.append(used_of(server))
    with server.client() as each:
        each.hset("vllm-gateway:key a", "e", "all")
    restored(server, f"1 {day} 50 50")
    found.append(used_of(server))
    if (int(time() // 86400), int(time() // 25200)) == (day, slot):  # otherwise midnight or a slice passed during the test
        assert found[0] == [0, 5, 2, 5, 2]
        assert found[1:3] == [[1, 15, 6, 22, 7]] * 2, "what counts no longer is forgotten"
        assert found[3] == [1, 17, 6, 23, 7], "only the difference to what was added is added"
        assert found[4] == found[3], "the store has counted everything since"


def test_earlier_use_of_another_day_is_remembered(server: RedisServer) -> None:
    day = int(time() // 86400)
    with server.client() as each:
        restored(server, f"1 {day - 1} 3 0", f"1 {day} 4 0", f"1 {day - 2} 9 0")
        assert [float(value) for value in each.hmget("vllm-gateway:key a", "d", "dt", "od", "odt")] == [day, 4, day - 1, 3]
        restored(server, f"1 {day - 1} 5 0")
        assert [float(value) for value in each.hmget("vllm-gateway:key a", "dt", "odt")] == [4, 5]
        assert each.ttl("vllm-gateway:key a") > 86400
