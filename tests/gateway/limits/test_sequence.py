"""Who asks one request after the other, each on a connection of its own: whichever worker takes it, the one before is settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from tests.support.process import Gateway, configuration, gateway, launched
from tests.support.redis_server import redis_server
from tests.support.running import KEY

MODEL = launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 0})
BEARER = {"authorization": f"Bearer {KEY}"}
LIMITED = {"id": "team-a", "hash": keys.hash_of(KEY), "limits": {"concurrent": 1, "tokens_per_day": 4000}}


def asked_in_turn(one: Gateway) -> list[int]:
    """The answers' statuses, half of them streams. Each request reserves more than half of the day's tokens."""
    statuses = []
    for number in range(100):
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 2100,
            "stream": number % 2 == 1,
        }
        answer = httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=BEARER, timeout=60, verify=False)
        statuses.append(answer.status_code)
    return statuses


@pytest.mark.parametrize("workers", [1, 2])
def test_nobody_is_in_his_own_way(tmp_path: Path, workers: int) -> None:
    with gateway(tmp_path, configuration(MODEL, workers=workers) | {"keys": [LIMITED]}) as one:
        assert asked_in_turn(one) == [200] * 100


def test_nor_where_a_store_counts(tmp_path: Path) -> None:
    with redis_server() as redis:
        config = configuration(MODEL, workers=2) | {"keys": [LIMITED], "limits_store": redis.url, "limits": {"on_store_failure": "refuse"}}
        with gateway(tmp_path, config) as one:
            assert {*asked_in_turn(one)} <= {200, 503}, "a store that takes its time is away"
