"""A client sends one request after the other, each on a new connection: the previous one is settled, whichever worker ran it."""

from __future__ import annotations

from itertools import pairwise
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


def statuses_in_sequence(one: Gateway) -> list[int]:
    """Send requests one after the other and return their statuses. Every second request streams.

    Each request reserves more than half of the tokens per day.
    """
    statuses = []
    for number in range(100):
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 2100,
            "stream": number % 2 == 1,
        }
        response = httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=BEARER, timeout=60, verify=False)
        statuses.append(response.status_code)
    return statuses


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_does_not_block_itself(tmp_path: Path, workers: int) -> None:
    with gateway(tmp_path, configuration(MODEL, workers=workers) | {"keys": [LIMITED]}) as one:
        assert statuses_in_sequence(one) == [200] * 100


def test_a_client_does_not_block_itself_with_a_store(tmp_path: Path) -> None:
    with redis_server() as redis:
        config = configuration(MODEL, workers=2) | {"keys": [LIMITED], "limits_store": redis.url, "limits": {"on_store_failure": "refuse"}}
        with gateway(tmp_path, config) as one:
            statuses = statuses_in_sequence(one)
    assert {*statuses} <= {200, 429, 503}, "a slow store is unavailable"
    # Only a request whose reservation was unknown to the gateway may still block the next one, until the store has released it.
    assert [pair for pair in pairwise(statuses) if pair == (200, 429)] == [] and statuses[0] != 429
