"""``balance: cost`` from a client's request to the server that gets it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import BodyRules
from tests.support.ports import refusing
from tests.support.running import KEY, Served, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import request, request_once
from upstream.balancing.server import Condition

SYSTEM = "You are the assistant of a customer. " * 100  # 3,700 characters


def responding(number: int) -> Any:
    """A server that responds with its number and with a usage object."""

    async def script(talk: Conversation) -> None:
        usage = {"prompt_tokens": 1000, "completion_tokens": 2, "total_tokens": 1002, "prompt_tokens_details": {"cached_tokens": 900}}
        await talk.respond(json.dumps({"number": number, "usage": usage}).encode())

    return script


@pytest.fixture
async def worker() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        ports = [(await stack.enter_async_context(scripted(responding(number)))).port for number in range(3)]
        yield await stack.enter_async_context(
            serving([model(*ports, balance="cost", policy={"explain": True}, body=BodyRules(("cache_salt",)))])
        )


async def server_of(worker: Served, messages: list[dict[str, str]], **body: Any) -> int:
    async with httpx2.AsyncClient() as client:
        response = await client.post(
            f"{worker.url}/v1/chat/completions",
            json={"model": "tiny", "messages": messages, **body},
            headers={"authorization": f"Bearer {KEY}"},
        )
    number: int = response.json()["number"]
    return number


def request_messages(customer: int, question: str = "Hello?") -> list[dict[str, str]]:
    return [{"role": "system", "content": f"{customer}. {SYSTEM}"}, {"role": "user", "content": question}]


async def test_requests_with_one_context_reach_one_server(worker: Served) -> None:
    homes = {customer: await server_of(worker, request_messages(customer)) for customer in range(9)}
    assert set(homes.values()) == {0, 1, 2}
    assert {customer: await server_of(worker, request_messages(customer, "And now?")) for customer in range(9)} == homes
    assert worker.in_flight == 0


async def test_salts_share_nothing(worker: Served) -> None:
    assert {await server_of(worker, request_messages(1), cache_salt=f"tenant {number}") for number in range(6)} == {0, 1, 2}


async def test_a_server_that_comes_up_again_has_no_blocks(worker: Served) -> None:
    home = await server_of(worker, request_messages(1))
    assert worker.worker.costs["tiny"].index.size
    for condition in (Condition.DOWN, Condition.UP):
        worker.worker.apply_health(Health({f"tiny#{home}": condition}, {}))
    assert not worker.worker.costs["tiny"].index.size


async def test_predictions_are_counted_and_explained(worker: Served) -> None:
    await server_of(worker, request_messages(1))
    await server_of(worker, request_messages(1))
    record = worker.context.records[-1]
    assert record.explanation is not None
    assert record.explanation["predicted_cached_tokens"] > 500
    assert len(record.explanation["candidates"]) == 3
    assert worker.value("predicted_tokens_total", "tiny", "cached") == 1800
    assert worker.value("predicted_tokens_total", "tiny", "predicted") > 500


async def test_a_model_without_a_server_that_is_up_has_no_placement(worker: Served) -> None:
    worker.worker.apply_health(Health({f"tiny#{number}": Condition.DOWN for number in range(3)}, {}))
    reply = await request_once(worker.port, request())
    assert (reply.status, reply.error["code"]) == (503, "no_healthy_server")
    await until(lambda: len(worker.context.records) == 1)
    assert worker.context.records[0].explanation is None
    assert worker.total("predicted_tokens_total") == worker.in_flight == 0


async def test_a_request_that_a_fallback_serves_leaves_nothing_on_its_servers() -> None:
    """The two servers refuse connections. They stay in the cost model, where no request may remain in flight."""
    with refusing() as port:
        async with scripted(responding(0)) as spare:
            requested = model(port, port, balance="cost", fallbacks=("other",))
            async with serving([requested, model(spare.port, identity="other")]) as served:
                for _ in range(3):
                    assert (await request_once(served.port, request())).headers["x-vllm-gateway-fallback"] == "other"
                assert served.total("server_failures_total") > 1
                costs = served.worker.costs["tiny"]
                assert [cost.in_flight for cost in costs.servers.values()] == [0, 0]
