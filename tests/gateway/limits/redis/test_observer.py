"""Control reads what a store counts, and adds what it has forgotten, once."""

from __future__ import annotations

import asyncio
from time import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits.budget_holders import PeriodUse
from gateway.limits.decision import Amounts, Holder
from gateway.limits.redis.observer import add_earlier_use, read_counts
from gateway.limits.windows import counted_periods, moment
from gateway.snapshot.snapshot import Budget, Limits
from tests.gateway.limits.redis.test_store import LIMITS, opened
from tests.support.examples import examples
from tests.support.redis_server import RedisServer

NARROW = Limits(tokens_per_day=400, tokens_per_month=500, budgets=(Budget("7d", 7 * 86400, tokens=100),))
_USE = st.lists(st.tuples(st.sampled_from(["day", "month", "7d"]), st.integers(0, 24), st.integers(0, 500), st.integers(0, 10**9)))


def test_earlier_use_is_added_once(server: RedisServer) -> None:
    @settings(max_examples=examples(30), deadline=None)
    @given(st.lists(_USE, min_size=1, max_size=3), st.integers(0, 100))
    def check(passes: list[Any], reserved: int) -> None:
        asyncio.run(add_several_times(server, passes, reserved))

    check()


async def add_several_times(server: RedisServer, passes: list[Any], reserved: int) -> None:
    """Add a growing use several times, each twice: the counts are the largest use and what the store has counted itself."""
    holder = Holder.placed("key a", NARROW, 0, {"7d": 0})
    at = moment(0.0, time())
    periods = {window.name: [*counted_periods(window, at)] for window in holder.windows}
    largest: PeriodUse = {}
    with server.client() as client:
        client.flushall()
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", [(holder, Amounts(1, 0, reserved))])).exceeded is None
        (before,) = (await read_counts(store, [holder])).values()
        for used in passes:
            for name, back, tokens, cost in used:
                period = name, periods[name][-1 - back % len(periods[name])]
                known = largest.get(period, (0, 0))
                largest[period] = max(tokens, known[0]), max(cost, known[1])
            for _ in range(2):
                await add_earlier_use(store, holder, largest)
        (after,) = (await read_counts(store, [holder])).values()
    added = {window.name: sum(tokens for (name, _), (tokens, _) in largest.items() if name == window.name) for window in holder.windows}
    assert [state.used for state in after.budgets] == [state.used + added[state.window] for state in before.budgets]
    assert after.is_restored and not before.is_restored


async def test_reading_changes_nothing_and_knows_each_holder(server: RedisServer) -> None:
    holders = [Holder.placed(f"key {number}", LIMITS, 0, {"7d": 0, "30d": 0}) for number in range(250)]
    async with opened(server.store_config()) as store:
        assert (await store.admit("r1", [(holders[7], Amounts(1, 0, 30))])).exceeded is None
        with server.client() as client:
            before = {name: client.dump(name) for name in client.scan_iter("vllm-gateway:key*")}
            known = await read_counts(store, holders)
            assert {name: client.dump(name) for name in client.scan_iter("vllm-gateway:key*")} == before
    assert [name for name, counts in known.items() if any(state.used for state in counts.budgets)] == ["key 7"]
    assert {state.used for state in known["key 7"].budgets if not state.budget.is_cost} == {30}
