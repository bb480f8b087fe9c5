"""The simulator's batch beside the real vLLM's: the order in which waiting requests start, and the time of a step by what is in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial

import httpx2
import pytest

from tests.support.shared import Shared
from tests.upstream.simulator.test_batch import BY_PRIORITY, order_of
from tests.upstream.simulator.test_process import running
from tests.vllm.gateway import NotAchieved, attempted
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.step_times import Engine
from tests.vllm.test_keys import SERVER_KEY, SLOTS, prioritized

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

HEADERS = {"authorization": f"Bearer {SERVER_KEY}"}
FLAGS = ("--scheduling-policy", "priority", "--max-num-seqs", str(SLOTS), "--sim-step-time", "0.006,0.0001,0.00007")
"""The times of the tiny model, more than twice as long."""
TOKENS = 40
REPETITIONS = 3
PROMPT = 1500
PROMPTS = 8


@pytest.fixture(scope="module", params=["@priority"])
def urls(shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the real server and the simulator."""
    server = shared.once(request.param, lambda: prioritized(tmp_path_factory.mktemp("engine")))
    with running(*FLAGS) as simulated:
        yield server.url, simulated.url


def test_waiting_requests_start_in_the_same_order(urls: tuple[str, str]) -> None:
    assert [asyncio.run(order_of(url, SLOTS, HEADERS)) for url in urls] == [BY_PRIORITY, BY_PRIORITY]


def test_a_step_takes_longer_with_more_requests_and_with_prompts(urls: tuple[str, str]) -> None:
    attempted(partial(_check_times, urls))


def _check_times(urls: tuple[str, str], _: int) -> None:
    """Compare the growth of the time between tokens. Raises NotAchieved if other processes have disturbed the engines."""
    growths = real, simulated = [asyncio.run(_growth(url)) for url in urls]
    monotonic = all(1 < eight < full and beside_prompts > 1 for eight, full, beside_prompts in growths)
    if not monotonic or not all(1 / 3 < one / other < 3 for one, other in zip(real, simulated, strict=True)):
        raise NotAchieved(f"real {real}, simulated {simulated}")


async def _growth(url: str) -> list[float]:
    """Return the time between tokens of 8, of ``SLOTS``, and of one request beside prompts, in times of that of one request alone."""
    async with httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=300, limits=httpx2.Limits(max_connections=None)) as client:
        alone, *others = [
            min([await _between_tokens(client, requests, prompts) for _ in range(REPETITIONS)])
            for requests, prompts in ((1, 0), (8, 0), (SLOTS, 0), (1, PROMPTS))
        ]
    return [each / alone for each in others]


async def _between_tokens(client: httpx2.AsyncClient, requests: int, prompts: int) -> float:
    """Generate tokens for a number of requests. Once they have begun, send prompts that generate only one token."""
    engine = Engine(client)
    before = await _sums(client)

    async def grown(tokens: int) -> tuple[float, int]:
        async with asyncio.timeout(60):
            while (after := await _sums(client))[1] < before[1] + tokens:
                pass
        return after[0] - before[0], after[1] - before[1]

    generating = [asyncio.create_task(engine.complete(8, TOKENS)) for _ in range(requests)]
    await grown(1)
    await asyncio.gather(*generating, *(engine.complete(PROMPT, 1) for _ in range(prompts)))
    seconds, tokens = await grown(requests * (TOKENS - 1))
    return seconds / tokens


async def _sums(client: httpx2.AsyncClient) -> tuple[float, int]:
    """Return the seconds between all tokens, and their number."""
    text = (await client.get("/metrics")).text
    found = re.findall(r"^vllm:inter_token_latency_seconds_(sum|count)\{.*\} (\S+)$", text, re.MULTILINE)
    values = {name: float(value) for name, value in found}
    return values.get("sum", 0.0), int(values.get("count", 0))
