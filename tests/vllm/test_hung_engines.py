"""A real engine reports no token and no byte while it computes a long prompt, but its KV cache grows."""

from __future__ import annotations

import threading

import httpx2
import pytest

from tests.vllm.server import NOT_INSTALLED, installed, running
from upstream.vllm.engine_counters import EngineCounters, parse_counters

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

PROMPT = [7] * 20_000
"""Token IDs. With 256 tokens in a step, the prefill takes 79 steps."""


def test_the_usage_of_the_cache_changes_while_no_token_is_counted() -> None:
    seen: list[EngineCounters] = []
    with (
        running("qwen3", flags={"max-model-len": 32768, "max-num-batched-tokens": 256}) as server,
        httpx2.Client(base_url=server.url, timeout=300) as client,
    ):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
        request = threading.Thread(target=lambda: httpx2.post(f"{server.url}/v1/completions", json=body, timeout=300))
        request.start()
        while request.is_alive():
            counters = parse_counters(client.get("/metrics").content)
            assert counters is not None
            seen.append(counters)
        request.join()
    before = [each for each in seen if each.prompt == 0 and each.unfinished]
    assert len({each.cache_usage for each in before}) > 5, seen
    assert {each.completion for each in before} == {0}
