"""A real vLLM that two keys keep busy, one with long and one with short outputs: they get the same service, in tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gateway.admission.service import ServiceWeights, Tokens
from gateway.auth.keys import hash_of
from tests.support.process import Gateway, configuration, gateway
from tests.support.shared import Shared
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.test_keys import SERVER_KEY, prioritized

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

OUTPUTS = {"long": 200, "short": 20}
SLOTS = 4
CLIENTS = {"long": 8, "short": 60}
"""So many that requests of both keys always wait, also while the clients get little time on a busy machine."""
LONG_REQUESTS = 120
WEIGHTS = ServiceWeights()


@pytest.fixture(scope="module", params=["@priority"])
def one(shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("fairness")
    server = shared.once(request.param, lambda: prioritized(folder))
    (folder / "server-key").write_text(SERVER_KEY)
    served = {"url": server.url, "model": "tiny", "api_key": {"file": "server-key"}}
    config = configuration({"id": "tiny", "servers": [served], "max_inflight": SLOTS, "queue": {"size": 200, "wait": "10m"}})
    config["keys"] = [{"id": name, "hash": hash_of(f"sk-{name}")} for name in OUTPUTS]
    with gateway(folder, config) as running_gateway:
        yield running_gateway


def test_long_and_short_outputs_get_the_same_service(one: Gateway) -> None:
    service = asyncio.run(_service(one.url))
    assert service["long"] / service["short"] == pytest.approx(1, abs=0.05)


async def _service(url: str) -> Counter[str]:
    """Keep the server busy until the long outputs have had ``LONG_REQUESTS``. Returns the service of each key."""
    service, ended = Counter[str](), Counter[str]()

    async def send(client: httpx2.AsyncClient, key: str) -> None:
        body = {"model": "tiny", "prompt": f"A {key} text", "max_tokens": OUTPUTS[key], "ignore_eos": True}
        while ended["long"] < LONG_REQUESTS:
            response = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer sk-{key}"})
            assert response.status_code == 200, response.text
            if ended["long"] < LONG_REQUESTS:
                usage = response.json()["usage"]
                service[key] += int(WEIGHTS.service(Tokens(usage["prompt_tokens"], usage["completion_tokens"])))
                ended[key] += 1

    async with (
        httpx2.AsyncClient(base_url=url, timeout=600, limits=httpx2.Limits(max_connections=None)) as client,
        asyncio.TaskGroup() as group,
    ):
        for key in OUTPUTS:
            for _ in range(CLIENTS[key]):
                group.create_task(send(client, key))
    return service
