"""The real vLLM with the qwen3 model generates every memorized dialogue exactly, plain and streamed.

The other tests depend on these. If one of these fails, the cause is the weights, the install or the flags, not the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.support.shared import Shared
from tests.vllm.chat import events, send_chat
from tests.vllm.dialogues import DIE, ENDLESS, PROMPT_AND_CONTINUATION, TOOLSETS, Exchange, exchanges, user
from tests.vllm.server import NOT_INSTALLED, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

PLAIN_AND_STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
WITHOUT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module", params=["@direct"])
def client(shared: Shared, request: pytest.FixtureRequest) -> Iterator[httpx2.Client]:
    server = shared.once(request.param, lambda: running("qwen3"))
    with httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client


@PLAIN_AND_STREAMED
@pytest.mark.parametrize("exchange", list(exchanges("qwen3")), ids=str)
def test_a_dialogue(client: httpx2.Client, exchange: Exchange, streamed: bool) -> None:
    got, want = send_chat(client, exchange.body(), streamed=streamed), exchange.expected()
    assert (got.reasoning, got.calls, got.finish_reason) == (want.reasoning, want.calls, want.finish_reason)
    if want.calls:
        assert not got.content.strip()
    elif exchange.dialogue.finishes:
        assert got.content == want.content
    else:
        assert got.content.lstrip("\n").startswith(ENDLESS[:1000])


@PLAIN_AND_STREAMED
def test_a_completion_continues_the_prompt(client: httpx2.Client, streamed: bool) -> None:
    body = {"model": "tiny", "prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 60, "stream": streamed}
    response = client.post("/v1/completions", json=body)
    parts = events(response.text) if streamed else [response.json()]
    assert "".join(part["choices"][0]["text"] for part in parts) == PROMPT_AND_CONTINUATION[1]


def test_the_die_falls_by_its_seed(client: httpx2.Client) -> None:
    body = {"messages": [user("Roll a die.")], "temperature": 1, "max_tokens": 5, **WITHOUT_THINKING}
    throws, again = ([send_chat(client, {**body, "seed": seed}, streamed=False).content for seed in range(20)] for _ in range(2))
    assert throws == again
    assert len(set(throws) & set(DIE)) > 1


def test_a_choice_binds(client: httpx2.Client) -> None:
    body = {"messages": [user("Who are you?")], "temperature": 0, "structured_outputs": {"choice": ["red", "blue"]}, **WITHOUT_THINKING}
    assert send_chat(client, body, streamed=False).content in {"red", "blue"}


@PLAIN_AND_STREAMED
def test_a_required_call_is_made(client: httpx2.Client, streamed: bool) -> None:
    body = {"messages": [user("Who are you?")], "tools": TOOLSETS[0], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    response = send_chat(client, {**body, **WITHOUT_THINKING}, streamed=streamed)
    assert [name for name, _ in response.calls] == ["get_current_weather"]
    assert response.finish_reason == "tool_calls"
