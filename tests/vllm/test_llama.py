"""The real vLLM with the llama model, whose template and tool calls (JSON) differ, generates its dialogues exactly."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.vllm.chat import send_chat
from tests.vllm.dialogues import ENDLESS, Exchange, exchanges
from tests.vllm.server import NOT_INSTALLED, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

# Llama 3's template and parser support only the first of several calls.
ANSWERABLE = [each for each in exchanges("llama") if len(each.expected().calls) < 2]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with running("llama") as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("exchange", ANSWERABLE, ids=str)
def test_a_dialogue(client: httpx2.Client, exchange: Exchange, streamed: bool) -> None:
    got, want = send_chat(client, exchange.body(), streamed=streamed), exchange.expected()
    assert (got.calls, got.finish_reason) == (want.calls, want.finish_reason)
    assert got.content == want.content if exchange.dialogue.finishes else got.content.startswith(ENDLESS[:1000])
