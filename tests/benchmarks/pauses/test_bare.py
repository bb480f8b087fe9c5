"""The bare protocol proxies what the benchmark's clients send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.benchmarks import standin
from tests.benchmarks.load import difference
from tests.benchmarks.pauses.observe import BARE
from tests.benchmarks.peers import Running, Setting, started
from tests.benchmarks.streams import crowd
from tests.benchmarks.wire import TOKEN, chat


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Running]:
    with standin.stream_server(tmp_path / "upstream", 50, 10) as port, started(BARE, Setting((port,)), tmp_path / "bare") as running:
        yield running


def post(running: Running, token: str) -> httpx2.Response:
    headers = {"authorization": f"Bearer {token}"}
    return httpx2.post(f"http://127.0.0.1:{running.port}/v1/chat/completions", content=chat(), headers=headers, timeout=60)


def test_a_response_is_the_servers(bare: Running) -> None:
    response = post(bare, TOKEN)
    assert difference(response.status_code, response.content) is None


def test_a_key_is_required(bare: Running) -> None:
    assert post(bare, "sk-other").status_code == 401


async def test_a_stream_arrives_whole(bare: Running) -> None:
    async with crowd(bare.port, chat(stream=True)) as clients:
        await clients.grow(3)
        for client in clients.clients:
            await client.ended
        assert (clients.events, clients.lost, list(clients.faults())) == (3 * 12, 0, [])  # the usage and [DONE] are events too
