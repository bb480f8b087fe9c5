"""Check ``balance: prefix`` in front of two real vLLM servers by the cache counters of the servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.support.process import Gateway, configuration, gateway
from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import WITHOUT_THINKING
from tests.vllm.server import NOT_INSTALLED, Flag, Server, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

FLAGS: Mapping[str, Flag] = {"block-size": 32, "reasoning-parser": "qwen3"}
CONVERSATIONS = 7  # an odd number: with round robin, the second round of each conversation goes to the other server
ROUNDS = 3
LONG = " ".join(f"Item {number} of the list is {number * number}." for number in range(16))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running("qwen3", flags=FLAGS)) for _ in range(2)]


@pytest.fixture(scope="module")
def one(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Run a gateway with a model for each balance. All models have the same two servers."""
    found = [{"url": server.url, "model": "tiny"} for server in servers]
    models = [{"id": balance, "balance": balance, "servers": found} for balance in ("prefix", "round_robin")]
    with gateway(Path(tmp_path_factory.mktemp("prefix")), configuration(*models)) as running_gateway:
        yield running_gateway


def count(servers: list[Server], name: str) -> float:
    """Return the sum of a metric over the servers, in tokens."""
    text = "\n".join(httpx2.get(f"{server.url}/metrics", timeout=60).text for server in servers)
    samples = [line for line in text.splitlines() if line.startswith(name + "{")]
    assert len(samples) == len(servers)
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def hit_rate(servers: list[Server], one: Gateway, balance: str) -> float:
    """Return the share of cached prompt tokens while all conversations ran, one request of each in every round."""
    before = [count(servers, f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries")]
    talks: list[list[Json]] = [[user(f"{balance} {number}. {LONG}")] for number in range(CONVERSATIONS)]
    for _ in range(ROUNDS):
        for talk in talks:
            response = one.request(model=balance, messages=talk, max_tokens=4, temperature=0, **WITHOUT_THINKING)
            assert response.status_code == 200, response.text
            talk += [{"role": "assistant", "content": "Yes."}, user(f"And then? {LONG}")]
    hits, queries = (count(servers, f"vllm:prefix_cache_{what}_total") - was for what, was in zip(("hits", "queries"), before, strict=True))
    return hits / queries


def test_conversations_find_their_prefix_in_the_cache(servers: list[Server], one: Gateway) -> None:
    rates = {balance: hit_rate(servers, one, balance) for balance in ("round_robin", "prefix")}
    print(f"hit rates by vLLM's own counters: {rates}")
    assert rates["prefix"] > rates["round_robin"] + 0.2
    assert one.metric('vllm_gateway_inflight_requests{model="prefix"}') == 0
