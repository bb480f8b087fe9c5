"""The used share of each budget: control shows what the workers, or a store that several gateways share, have counted."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic, time

import msgspec
import pytest

from gateway.auth import keys
from gateway.limits import Limiter
from gateway.limits.decision import Holder
from gateway.limits.limiter import shown_budgets
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import moment
from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import Allowance, Budget, Key, Limits, LimitsStore, PerUser, Snapshot
from gateway.telemetry.metrics import WorkerMetrics
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.redis_server import redis_server
from tests.support.running import KEY, shared_counters, until

MODEL = launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 0}) | {"price": {"prompt": 1000, "completion": 3000}}
BUDGETS = {"tokens_per_day": 100_000, "budgets": [{"window": "168h", "cost": 0.5}, {"window": "week", "tokens": 40, "soft": True}]}
LIMITED = {"id": "team-a", "hash": keys.hash_of(KEY), "team": "lab", "limits": BUDGETS}


def share(one: Gateway, holder: str, budget: str, soft: str = "false") -> float:
    return one.metric(f'vllm_gateway_budget_used_ratio{{budget="{budget}",holder="{holder}",soft="{soft}"}}')


@pytest.mark.parametrize("in_store", [False, True], ids=["in memory", "in a store"])
def test_the_used_share_of_each_budget_is_a_metric(tmp_path: Path, in_store: bool) -> None:
    config = configuration(MODEL, workers=2) | {"keys": [LIMITED], "teams": [{"id": "lab", "limits": {"cost_per_month": 5}}]}
    with ExitStack() as stack:
        if in_store:
            config["limits_store"] = stack.enter_context(redis_server()).url
        one = stack.enter_context(gateway(tmp_path, config))
        assert share(one, "key team-a", "tokens_per_day") == 0
        tokens = cost = 0
        for _ in range(6):
            usage = one.request(model="m", max_tokens=4).json()["usage"]
            tokens += usage["total_tokens"]
            cost += usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 3000
        wait_for(lambda: share(one, "key team-a", "tokens_per_day") == pytest.approx(tokens / 100_000))
        assert share(one, "key team-a", "tokens_per_week", "true") == pytest.approx(tokens / 40)
        assert share(one, "key team-a", "cost_per_7d") == pytest.approx(cost / 500_000)
        assert share(one, "team lab", "cost_per_month") == pytest.approx(cost / 5_000_000)


def test_a_bounded_number_of_reported_budgets_is_remembered() -> None:
    limits = Limits(tokens_per_day=100)
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        (state,) = buckets.budget_states(buckets.holder("key a", limits), moment(monotonic(), time()))
        reported = msgspec.structs.replace(state, used=40.0, reset=1000.0)
        holders = [Holder.placed(f"key {number}", limits) for number in range(10_001)]

        def left(number: int) -> float:
            return limiter.reported_capacity([holders[number]])[0].tokens

        limiter.note_budgets([(holders[0], reported)])
        assert (left(0), left(1)) == (60, 100), "without a report, it counts as unused"
        limiter.note_budgets([(holder, reported) for holder in holders])
        assert (left(0), left(1), left(10_000)) == (100, 60, 60)
        limiter.note_budgets([(holders[10_000], msgspec.structs.replace(reported, used=70.0))])
        assert (left(1), left(10_000)) == (60, 30), "a new report replaces the earlier one"


def limited(concurrent: int | None) -> Key:
    limits = () if concurrent is None else (Allowance("key alice", Limits(concurrent=concurrent)),)
    return Key("alice", allowances=limits)


def limit_of(limiter: Limiter, key: Key) -> int | None:
    (holder,) = limiter.limits_of(key).for_all_models
    return holder.limits.concurrent


def test_a_key_of_the_store_has_limits_from_its_first_request_on() -> None:
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        former = limited(3)
        limiter.apply_stored_keys(StoredKeys((former,)))
        assert limit_of(limiter, former) == 3
        limiter.apply_stored_keys(StoredKeys((limited(5),)))
        assert limit_of(limiter, former) == 5, "a request in flight does not bring the former limits back"
        stored = {"alice": limited(5)}
        limiter.apply_snapshot(Snapshot(2, (), ()), stored)
        assert limit_of(limiter, former) == 5
        limiter.apply_stored_keys(StoredKeys((limited(None),)))
        limiter.apply_stored_keys(StoredKeys((limited(7),)))
        assert limit_of(limiter, limited(7)) == 7
        limiter.apply_stored_keys(StoredKeys(removed=("alice",)))
        limiter.apply_stored_keys(StoredKeys((limited(9),)))
        assert limit_of(limiter, limited(9)) == 9


def test_a_change_of_limits_keeps_the_use() -> None:
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        first = limiter.limits_of(limited(3)).for_all_models[0]
        limiter.apply_stored_keys(StoredKeys((limited(5),)))
        assert limiter.limits_of(limited(5)).for_all_models[0].offset == first.offset


async def test_a_key_without_limits_has_no_states() -> None:
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        assert await Limiter(WorkerMetrics(counters), buckets, lambda _: None).states(Key("free"), "r1") == []


def test_without_a_store_there_are_no_leases_to_stop() -> None:
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        Limiter(WorkerMetrics(counters), buckets, lambda _: None).stop_leases()


def test_the_metric_of_refusals_has_the_limits_of_a_key_from_the_start() -> None:
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        Limiter(WorkerMetrics(counters), buckets, lambda _: None).apply_snapshot(Snapshot(1, (limited(3),), ()))
        (shown,) = (name for name, _ in counters.readings() if "limited_total" in name)
        assert "alice" in shown and "concurrent" in shown


def test_the_metric_of_end_users_without_counts_has_a_key_from_the_start() -> None:
    users = Key("alice", allowances=(Allowance("key alice each user", Limits(concurrent=1), users=PerUser()),))
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        Limiter(WorkerMetrics(counters), buckets, lambda _: None).apply_snapshot(Snapshot(1, (users,), ()))
        assert len([name for name, _ in counters.readings() if "limited_users_overflow_total" in name]) == 1


def test_only_a_key_with_sessions_has_their_metric() -> None:
    sessions = Key("with", allowances=(Allowance("key with", Limits(session=Budget("session", tokens=5))),))
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        limiter.apply_snapshot(Snapshot(1, (sessions, limited(3)), ()))
        shown = [name for name, _ in counters.readings() if "session_evictions_total" in name]
        assert len(shown) == 1 and "with" in shown[0]


@pytest.mark.parametrize(("concurrent", "store", "is_used"), [(3, True, True), (None, True, False), (3, False, False)])
def test_a_store_is_used_if_the_snapshot_has_limits_for_it(concurrent: int | None, store: bool, is_used: bool) -> None:
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        limiter.apply_snapshot(Snapshot(1, (limited(3),), (), limits_store=LimitsStore()))
        limiter.apply_snapshot(Snapshot(2, (limited(concurrent),), (), limits_store=LimitsStore(database=1) if store else None))
        assert (limiter.store is not None) is is_used


async def test_a_tick_opens_the_store(tmp_path: Path) -> None:
    reported: list[str | None] = []
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, reported.append)
        limiter.tick()
        limiter.apply_snapshot(Snapshot(1, (limited(3),), (), limits_store=LimitsStore(path=str(tmp_path / "absent"))))
        assert not reported
        with closing(limiter):
            limiter.tick()
            await until(lambda: reported)
    assert reported[0] is not None, "it can't be reached"


def test_each_budget_of_a_holder_is_shown_once() -> None:
    limits = Limits(tokens_per_day=100, requests_per_minute=5)
    allowances = [
        *[Allowance("team lab", limits)] * 2,
        Allowance("key a", Limits(concurrent=1)),
        Allowance("key b each user", limits, users=PerUser()),
    ]
    with closing(Buckets.private()) as buckets:
        shown = [(name, state.budget.name) for name, state in shown_budgets(buckets, allowances)]
    assert shown == [(name, "tokens_per_day") for name in ("team lab", "key b other users", "key b without user")]
