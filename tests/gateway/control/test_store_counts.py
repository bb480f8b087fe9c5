"""Operators see what key holders see, with and without a store, over restarts and gateways; an emptied store gets its budgets back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.redis_server import RedisServer, redis_server
from tests.support.running import KEY

MODEL = launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 0}) | {"price": {"prompt": 1000, "completion": 3000}}
OWN = {"tokens_per_day": 3000, "requests_per_minute": 600, "budgets": [{"window": "168h", "cost": 5}]}
LIMITED = {"id": "team-a", "hash": keys.hash_of(KEY), "team": "lab", "limits": OWN}


def config_of(redis: RedisServer | None, **more: Any) -> dict[str, Any]:
    found = configuration(MODEL) | {"keys": [LIMITED], "teams": [{"id": "lab", "limits": {"cost_per_month": 5}}]} | more
    return found if redis is None else found | {"limits_store": redis.url}


def of_operator(one: Gateway) -> dict[str, Any]:
    """Return what is used of each budget, by the admin port."""
    return {each["limit"]: each["used"] for each in one.get("/limits?key=team-a").json()["limits"] if "minute" not in each["limit"]}


def of_key(one: Gateway) -> dict[str, Any]:
    """Return what is used of each budget, by the data port."""
    url, headers = f"http://127.0.0.1:{one.data}/v1/limits", {"authorization": f"Bearer {KEY}"}
    known = httpx2.get(url, headers=headers, trust_env=False).json()["limits"]
    return {each["limit"]: each["used"] for each in known if "minute" not in each["limit"]}


def shares(one: Gateway) -> dict[str, float]:
    """Return the used share of each budget, by the metrics."""
    lines = [line for line in one.get("/metrics").text.splitlines() if line.startswith("vllm_gateway_budget_used_ratio{")]
    return {line.partition('budget="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


AMOUNTS = {"tokens_per_day": 3000, "cost_per_7d": 5, "cost_per_month": 5}


def is_equal(*several: Gateway) -> bool:
    """Check that operators of all gateways and the key's holder see the same use, which is in the metrics."""
    seen = [view for one in several for view in (of_operator(one), of_key(one))]
    expected = {name: pytest.approx(used / AMOUNTS[name]) for name, used in seen[0].items()}
    return all(view == seen[0] for view in seen) and all(shares(one) == expected for one in several)


@contextmanager
def folders(path: Path, count: int) -> Iterator[list[Path]]:
    made = [path / str(number) for number in range(count)]
    for each in made:
        each.mkdir()
    yield made


@pytest.mark.parametrize("in_store", [False, True], ids=["in memory", "in a store"])
def test_operators_see_what_key_holders_see_after_a_restart_and_on_each_gateway(tmp_path: Path, in_store: bool) -> None:
    with ExitStack() as stack, folders(tmp_path, 2) as (first, second):
        redis = stack.enter_context(redis_server()) if in_store else None
        config = config_of(redis, ledger=f"sqlite:///{tmp_path}/usage.db")
        with gateway(first, config) as one:
            used = sum(one.request(model="m", max_tokens=4).json()["usage"]["total_tokens"] for _ in range(4))
            wait_for(lambda: of_operator(one)["tokens_per_day"] == used)
            wait_for(lambda: is_equal(one))
        with gateway(first, config) as one:
            assert of_operator(one)["tokens_per_day"] == used
            wait_for(lambda: is_equal(one))
            if redis is not None:
                with gateway(second, config) as other:  # the key does not use it
                    wait_for(lambda: is_equal(one, other))
                    assert of_operator(other)["tokens_per_day"] == used


def test_the_use_in_a_store_that_does_not_respond_is_unknown(tmp_path: Path) -> None:
    with redis_server() as redis, gateway(tmp_path, config_of(redis)) as one:
        wait_for(lambda: shares(one).keys() == AMOUNTS.keys())
        redis.stop()
        wait_for(lambda: shares(one) == {})
        assert of_operator(one) == dict.fromkeys(AMOUNTS)
        assert "-" in one.command("limits", "--key", "team-a").stdout
        redis.start()
        wait_for(lambda: shares(one).keys() == AMOUNTS.keys())


@pytest.mark.parametrize("is_running", [False, True], ids=["between two starts", "while the gateway runs"])
def test_an_emptied_store_gets_its_budgets_from_the_ledger_once(tmp_path: Path, is_running: bool) -> None:
    with redis_server() as redis, folders(tmp_path, 2) as (first, second):
        config = config_of(redis, ledger=f"sqlite:///{tmp_path}/usage.db")

        def restored(one: Gateway) -> bool:
            return "the ledger has restored the budgets of 2 keys and teams" in one.output

        with gateway(first, config) as one:
            used = sum(one.request(model="m", max_tokens=4).json()["usage"]["total_tokens"] for _ in range(4))
            wait_for(lambda: one.metric('vllm_gateway_ledger_rows_total{outcome="written"}') == 4)
            wait_for(lambda: of_operator(one)["tokens_per_day"] == used)
            before = of_operator(one)
            assert not restored(one)
            if is_running:
                redis.stop()
                redis.start()
                wait_for(lambda: restored(one), why=lambda: one.output)
                wait_for(lambda: of_operator(one) == before)
                wait_for(lambda: "is available again" in one.output)  # until then the worker counts by itself
                used += one.request(model="m", max_tokens=4).json()["usage"]["total_tokens"]
                wait_for(lambda: of_operator(one)["tokens_per_day"] == used)
        if not is_running:
            redis.stop()
            redis.start()
            with gateway(first, config) as one:
                assert restored(one) and of_operator(one) == before
        with gateway(second, config) as other:
            assert of_operator(other)["tokens_per_day"] == used, "the second gateway has not added it again"
            assert not restored(other)


def test_counts_of_commit_3c1fad8_are_continued_and_not_added_again(tmp_path: Path) -> None:
    """It stored costs in units of the currency, and no mark of what was added."""
    with redis_server() as redis:
        config = config_of(redis, ledger="sqlite:///usage.db")
        with gateway(tmp_path, config) as one:
            used = one.request(model="m", max_tokens=4).json()["usage"]["total_tokens"]
            wait_for(lambda: one.metric('vllm_gateway_ledger_rows_total{outcome="written"}') == 1)
            wait_for(lambda: of_operator(one)["tokens_per_day"] == used)
            before = of_operator(one)
        with redis.client() as client:
            client.delete("vllm-gateway:store")
            for name in client.scan_iter("vllm-gateway:*"):
                for period in ("d", "od", "m", "om"):
                    if (cost := client.hget(name, f"{period}n")) is not None:
                        client.hset(name, f"{period}c", float(cost) / 1e9)
                        client.hdel(name, f"{period}n")
                client.hdel(name, "e")
            user = "vllm-gateway:key staff/alice"  # of an identity provider, so no holder of the configuration
            client.hset(user, mapping={"d": 20000, "dt": 7, "dc": 0.1, "od": 19999, "odt": 3, "odc": 0.25})
        with gateway(tmp_path, config) as one:
            assert of_operator(one) == before
        with redis.client() as client:
            assert client.hmget(user, "dt", "dn", "odn", "dc", "e") == [b"7", b"100000000", b"250000000", None, b"all"]
