"""A real vLLM that two keys keep busy, one with long and one with short outputs: they get the same service, in tokens.

And a class with a reserved slot does not wait after a class that keeps the other slots busy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.admission.weighted_tokens import ServiceWeights, Tokens
from gateway.auth.keys import hash_of
from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.support.shared import Shared
from tests.vllm.server import NOT_INSTALLED, Server, installed
from tests.vllm.test_keys import SERVER_KEY, prioritized

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

OUTPUTS = {"long": 200, "short": 20}
SLOTS = 4
CLIENTS = {"long": 8, "short": 60}
"""So many that requests of both keys always wait, also while the clients get little time on a busy machine."""
LONG_REQUESTS = 120
WEIGHTS = ServiceWeights()
MEASUREMENTS = 3
"""A machine that pauses its clients shifts the service of one measurement."""
CHATS = 8


@pytest.fixture(scope="module", params=["@priority"])
def server(shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared.once(request.param, lambda: prioritized(tmp_path_factory.mktemp("fairness")))


@contextmanager
def served(
    folder: Path, server: Server, keys: Mapping[str, Mapping[str, Any]], classes: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Gateway]:
    """Run a gateway with a few slots of the server. ``keys``: the settings of each key."""
    (folder / "server-key").write_text(SERVER_KEY)
    servers = [{"url": server.url, "model": "tiny", "api_key": {"file": "server-key"}}]
    config = configuration({"id": "tiny", "servers": servers, "max_inflight": SLOTS, "queue": {"size": 1000, "wait": "10m"}})
    config["keys"] = [{"id": name, "hash": hash_of(f"sk-{name}"), **more} for name, more in keys.items()]
    with gateway(folder, config | ({"classes": list(classes)} if classes else {})) as one:
        yield one


async def complete(client: httpx2.AsyncClient, key: str, tokens: int) -> Tokens:
    """Send a request and return the tokens of its response."""
    body = {"model": "tiny", "prompt": f"A {key} text", "max_tokens": tokens, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer sk-{key}"})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return Tokens(usage["prompt_tokens"], usage["completion_tokens"])


def connected(one: Gateway) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=one.url, timeout=600, limits=httpx2.Limits(max_connections=None))


def test_long_and_short_outputs_get_the_same_service(tmp_path: Path, server: Server) -> None:
    ratios = list[float]()
    with served(tmp_path, server, {name: {} for name in OUTPUTS}) as one:
        while len(ratios) < MEASUREMENTS and ratios[-1:] != pytest.approx([1], abs=0.05):
            service = asyncio.run(_service(one))
            ratios.append(service["long"] / service["short"])
    assert ratios[-1] == pytest.approx(1, abs=0.05), ratios


async def _service(one: Gateway) -> Counter[str]:
    """Keep the server busy until enough long outputs have ended. Return the service of each key."""
    service, ended = Counter[str](), Counter[str]()

    async def send(client: httpx2.AsyncClient, key: str) -> None:
        while ended["long"] < LONG_REQUESTS:
            tokens = await complete(client, key, OUTPUTS[key])
            if ended["long"] < LONG_REQUESTS:
                service[key] += int(WEIGHTS.service(tokens))
                ended[key] += 1

    async with connected(one) as client, asyncio.TaskGroup() as group:
        for key in OUTPUTS:
            for _ in range(CLIENTS[key]):
                group.create_task(send(client, key))
    return service


@pytest.mark.parametrize("reserved", [0, 1])
def test_a_class_with_a_reserved_slot_does_not_wait(tmp_path: Path, server: Server, reserved: int) -> None:
    """It is counted: the gateway dispatches requests of the class from its queue, or sends them at once."""
    classes: list[dict[str, Any]] = [{"id": "chat", "strict": True}, {"id": "batch"}]
    if reserved:
        classes[0]["reserved_slots"] = reserved
    with served(tmp_path, server, {name: {"class": name} for name in ("chat", "batch")}, classes) as one:
        asyncio.run(_beside_batch(one))
        queued = {
            name: one.metric(f'vllm_gateway_queue_requests_total{{class="{name}",key="{name}",model="tiny",team=""}}')
            for name in ("chat", "batch")
        }
    assert queued["batch"]
    assert queued["chat"] == 0 if reserved else queued["chat"] > CHATS // 2  # some may find a slot that is free for an instant


async def _beside_batch(one: Gateway) -> None:
    """Send chats one after the other, while more requests of the batch wait than it may have slots."""
    async with connected(one) as client:

        async def send_batch() -> None:
            while True:
                await complete(client, "batch", 60)

        batch = [asyncio.create_task(send_batch()) for _ in range(10 * SLOTS)]
        await asyncio.to_thread(wait_for, lambda: one.metric('vllm_gateway_queued_requests{model="tiny"}') > SLOTS)
        for _ in range(CHATS):
            await complete(client, "chat", 5)
        for each in batch:
            each.cancel()
        await asyncio.gather(*batch, return_exceptions=True)
