"""Who asks one request after the other, each on a connection of its own: whichever relay takes it, the one before is settled."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from gateway import keys
from tests.support.process import configuration, gateway, launched
from tests.support.running import KEY

LIMITS = {"concurrent": 1, "tokens_per_day": 4000}


@pytest.mark.parametrize("relays", [1, 2])
def test_nobody_is_in_his_own_way(tmp_path: Path, relays: int) -> None:
    config = configuration(launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 0}), relays=relays)
    config["keys"] = [{"id": "team-a", "hash": keys.hash_of(KEY), "limits": LIMITS}]
    with gateway(tmp_path, config) as one:
        for number in range(100):
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2100, "stream": number % 2 == 1}
            answer = httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
            assert answer.status_code == 200, answer.text
