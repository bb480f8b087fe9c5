"""The real vLLM with each tiny model says every memorised dialogue word for word, plain and streamed.

What the other tests build on: when one of these fails, the weights, the install or the flags are at fault, not the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx2
import pytest

from tests.vllm.dialogues import DIE, ENDLESS, STORY, TOOLSETS, Answer, Architecture, Exchange, Json, exchanges, user
from tests.vllm.server import NOT_INSTALLED, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED), pytest.mark.timeout(600)]

QWEN3 = list(exchanges("qwen3"))
# Of several calls at once, Llama 3's template and parser know only the first.
LLAMA = [each for each in exchanges("llama") if len(each.expected().calls) < 2]
WITHOUT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return cast(Architecture, request.param)


@pytest.fixture(scope="module")
def client(architecture: Architecture) -> Iterator[httpx2.Client]:
    with running(architecture) as server, httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    ("architecture", "exchange"),
    [*(("qwen3", each) for each in QWEN3), *(("llama", each) for each in LLAMA)],
    ids=str,
    indirect=["architecture"],
)
def test_a_dialogue(client: httpx2.Client, exchange: Exchange, streamed: bool) -> None:
    got, want = ask(client, exchange.body(), streamed=streamed), exchange.expected()
    assert (got.reasoning, got.calls, got.finish_reason) == (want.reasoning, want.calls, want.finish_reason)
    if want.calls:
        assert not got.content.strip()
    elif exchange.dialogue.ends:
        assert got.content == want.content
    else:
        assert got.content.lstrip("\n").startswith(ENDLESS[:1000])


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_the_story_goes_on(client: httpx2.Client, streamed: bool) -> None:
    body = {"model": "tiny", "prompt": STORY[0], "temperature": 0, "max_tokens": 60, "stream": streamed}
    answer = client.post("/v1/completions", json=body)
    parts = events(answer.text) if streamed else [answer.json()]
    assert "".join(part["choices"][0]["text"] for part in parts) == STORY[1]


def test_the_die_is_cast_anew_for_each_seed(client: httpx2.Client) -> None:
    body = {"messages": [user("Roll a die.")], "temperature": 1, "max_tokens": 5, **WITHOUT_THINKING}
    throws = [ask(client, {**body, "seed": seed}, streamed=False).content for seed in range(20)]
    again = [ask(client, {**body, "seed": seed}, streamed=False).content for seed in range(20)]
    assert throws == again
    assert len(set(throws) & set(DIE)) > 1


def test_a_choice_binds(client: httpx2.Client) -> None:
    body = {"messages": [user("Who are you?")], "temperature": 0, "structured_outputs": {"choice": ["red", "blue"]}, **WITHOUT_THINKING}
    assert ask(client, body, streamed=False).content in {"red", "blue"}


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_required_call_is_made(client: httpx2.Client, streamed: bool) -> None:
    body = {"messages": [user("Who are you?")], "tools": TOOLSETS[0], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    answer = ask(client, {**body, **WITHOUT_THINKING}, streamed=streamed)
    assert [name for name, _ in answer.calls] == ["get_current_weather"]
    assert answer.finish_reason == "tool_calls"


def ask(client: httpx2.Client, body: Json, *, streamed: bool) -> Answer:
    """One chat completion, folded together."""
    extra = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    answer = client.post("/v1/chat/completions", json={"model": "tiny", **body, **extra})
    assert answer.status_code == 200, answer.text
    parts = events(answer.text) if streamed else [answer.json()]
    assert parts[-1]["usage"]["completion_tokens"] > 0
    return folded([choice for part in parts for choice in part["choices"]])


def events(text: str) -> list[Any]:
    """The JSON of a stream's events. Split at blank lines, not at lines: U+2028 is a character of a text here."""
    *frames, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def folded(choices: list[Json]) -> Answer:
    """The whole answer from its deltas, or from the one message."""
    deltas: list[Json] = [choice.get("delta") or choice["message"] for choice in choices]
    [finish_reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        for position, call in enumerate(delta.get("tool_calls") or []):
            function, index = call["function"], call.get("index", position)
            name, arguments = calls.get(index, ("", ""))
            calls[index] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
    made = tuple((name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items()))
    return Answer(joined(deltas, "reasoning"), joined(deltas, "content"), made, finish_reason)


def joined(deltas: list[Json], key: str) -> str:
    return "".join(delta.get(key) or "" for delta in deltas)
