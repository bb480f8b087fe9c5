"""Check ``balance: prefix`` and ``cost`` in front of two real vLLM servers, by what the servers report about their caches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.support.process import Gateway, configuration, gateway
from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import WITHOUT_THINKING
from tests.vllm.kv_events import Comparison, Traffic, flags
from tests.vllm.server import NOT_INSTALLED, Server, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

CONVERSATIONS = 7  # an odd number: with round robin, the second round of each conversation goes to the other server
ROUNDS = 3
LONG = " ".join(f"Item {number} of the list is {number * number}." for number in range(16))


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """Return a folder for the sockets of the servers' KV cache events, with a short path."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def servers(sockets: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running("qwen3", flags=flags(sockets, number, blocks=None))) for number in range(2)]


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


def test_predicted_cached_tokens_are_those_of_the_responses(servers: list[Server], sockets: Path) -> None:
    comparison = Comparison(sockets, [server.url for server in servers])
    try:
        comparison.start_gateway()
        traffic = Traffic(11)
        comparison.play("first", 12, traffic)
        comparison.start_gateway()
        comparison.play("after a restart of the gateway", 4, traffic)
        assert comparison.shares() == {"first": (12, 12), "after a restart of the gateway": (4, 4)}
        assert sum(each.cached for each in comparison.sent) > 1000
    finally:
        comparison.close()
