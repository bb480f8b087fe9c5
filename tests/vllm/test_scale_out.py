"""The simulator's render, generate and derender beside the real vLLM's: the same requests to both, compared like the other routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.shared import Shared
from tests.upstream.simulator import test_process as simulator
from tests.upstream.simulator.test_fidelity import (
    CHAT,
    FLAGS,
    PLAIN,
    PLAIN_QUESTION,
    QUESTION,
    RUNNING,
    SCHEMA,
    TOOL,
    USAGE,
    Body,
    both,
    events,
    frames,
    kind,
    shape,
    summary,
    worded,
)
from tests.vllm.server import NOT_INSTALLED, PARSERS, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

Clients = tuple[httpx2.Client, httpx2.Client]

RENDER, DERENDER, GENERATE = f"{CHAT}/render", f"{CHAT}/derender", "/inference/v1/generate"

RENDERED: dict[str, Body] = {
    "reasoning": QUESTION,
    "plain": PLAIN_QUESTION,
    "hidden reasoning": {**QUESTION, "include_reasoning": False},
    "an effort": {**QUESTION, "reasoning_effort": "none"},
    "sampling": {**QUESTION, "temperature": 0.5, "top_p": 0.5, "min_p": 0.1, "top_k": 5, "seed": 1, "n": 2},
    "penalties": {**QUESTION, "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.5, "logit_bias": {"300": 1}},
    "stop strings": {**QUESTION, "stop": ["a", "b"], "min_tokens": 3, "ignore_eos": True},
    "vLLM's default length": {**QUESTION, "max_tokens": 16},
    "no length": {**QUESTION, "max_tokens": None},
    "log probabilities": {**QUESTION, "logprobs": True, "top_logprobs": 2},
    "a stream": {**QUESTION, **USAGE, "return_token_ids": True, "cache_salt": "salt", "priority": 1},
    "a choice": {**QUESTION, "structured_outputs": {"choice": ["red", "blue"]}},
    "an object": {**QUESTION, "response_format": {"type": "json_object"}},
    "a schema": {**QUESTION, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "a tool": TOOL,
    "a required tool": {**TOOL, "tool_choice": "required"},
}
GENERATED: dict[str, Body] = {
    "tokens": {},
    "the prompt": {"return_token_ids": True},
    "log probabilities": {"sampling_params": {"temperature": 0, "max_tokens": 3, "logprobs": 2}},
    "log probabilities alone": {"sampling_params": {"temperature": 0, "max_tokens": 3, "logprobs": 0}},
    "two choices": {"sampling_params": {"max_tokens": 3, "n": 2}},
    "no parameters": {"sampling_params": {}, "stream_options": {"include_usage": True}},
}
STREAMED: dict[str, Body] = {
    **GENERATED,
    "usage": USAGE,
    "running usage": RUNNING,
    "too many log probabilities": {"sampling_params": {"logprobs": 50}},
}
CHUNK: Body = {
    "stream": True,
    "generate_chunk": {"choices": [{"index": 0, "token_ids": [300]}]},
    "prompt_token_ids": [300],
    "chat_request": QUESTION,
}
REFUSED: dict[str, tuple[str, Body]] = {
    "a rendered model that is unknown": (RENDER, {**QUESTION, "model": "other"}),
    "no messages": (RENDER, {"model": "tiny"}),
    "a minimum above the limit": (RENDER, {**QUESTION, "min_tokens": 400}),
    "a prompt that is too long": (RENDER, {**QUESTION, "messages": [{"role": "user", "content": "word " * 3000}]}),
    "no tokens and no parameters": (GENERATE, {}),
    "an empty prompt": (GENERATE, {"token_ids": [], "sampling_params": {}}),
    "a negative token": (GENERATE, {"token_ids": [-1], "sampling_params": {}}),
    "an unknown model": (GENERATE, {"token_ids": [300], "sampling_params": {}, "model": "other"}),
    "a temperature that is too high": (GENERATE, {"token_ids": [300], "sampling_params": {"temperature": 5.0}}),
    "no tokens to generate": (GENERATE, {"token_ids": [300], "sampling_params": {"max_tokens": 0}}),
    "a prompt longer than the context": (GENERATE, {"token_ids": [300] * 3000, "sampling_params": {}}),
    "a prompt as long as the context": (GENERATE, {"token_ids": [300] * 2048, "sampling_params": {}}),
    "too many log probabilities": (GENERATE, {"token_ids": [300], "sampling_params": {"logprobs": 50}}),
    "nothing to derender": (DERENDER, {}),
    "a stream without a chunk": (DERENDER, {"stream": True}),
    "no chat": (DERENDER, {**CHUNK, "chat_request": None}),
    "a chat without messages": (DERENDER, {**CHUNK, "chat_request": {}}),
    "no prompt": (DERENDER, {**CHUNK, "prompt_token_ids": None}),
    "an unknown model to derender": (DERENDER, {**CHUNK, "model": "other"}),
    "two choices in a chunk": (DERENDER, {**CHUNK, "generate_chunk": {"choices": [{"index": 0}, {"index": 1}]}}),
    "a state that contradicts itself": (DERENDER, {**CHUNK, "stream_state": {"output_token_ids": [300], "output_chunk_lens": [2]}}),
    "a chunk that is too long": (DERENDER, {**CHUNK, "generate_chunk": {"choices": [{"index": 0, "token_ids": [300] * 2048}]}}),
}


@pytest.fixture(scope="module", params=["@scale_out"])
def clients(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Clients]:
    """The real server's and the simulator's."""
    server = shared.once(request.param, lambda: running("qwen3", flags={**PARSERS["qwen3"], "enable-scale-out": True}))
    with simulator.running(*FLAGS, "--enable-scale-out") as simulated, httpx2.Client(base_url=server.url, timeout=120) as client:
        yield client, simulated.client


@pytest.mark.parametrize("body", RENDERED.values(), ids=RENDERED)
def test_a_request_is_rendered_with_the_same_fields(clients: Clients, body: Body) -> None:
    real, simulated = (response.json() for response in both(clients, RENDER, json=body))
    if body is TOOL:  # the real model reads the prompt
        assert "structured_outputs" not in real["sampling_params"]
        del simulated["sampling_params"]["structured_outputs"]
    assert shape(simulated) == shape(real)
    for name in (
        "output_kind",
        "skip_special_tokens",
        "n",
        "logprobs",
        "temperature",
        "top_p",
        *(["max_tokens"] if body["max_tokens"] else []),
    ):
        assert simulated["sampling_params"].get(name) == real["sampling_params"].get(name)
    for value in ("model", "reasoning_ended", "reasoning_parser_kwargs", "stream", "stream_options", "priority"):
        assert simulated[value] == real[value]


@pytest.mark.parametrize("more", GENERATED.values(), ids=GENERATED)
def test_generated_tokens_have_the_same_fields(clients: Clients, more: Body) -> None:
    real, simulated = (client.post(GENERATE, json={**rendered(client, QUESTION), **more}) for client in clients)
    assert (simulated.status_code, real.status_code) == (200, 200)
    assert shape(simulated.json()) == shape(real.json())


@pytest.mark.parametrize("more", STREAMED.values(), ids=STREAMED)
def test_generated_streams_have_the_same_frames(clients: Clients, more: Body) -> None:
    for _ in range(5):  # an engine that is behind puts several tokens into one event
        real, simulated = (client.post(GENERATE, json={**rendered(client, QUESTION), "stream": True, **more}).text for client in clients)
        if (summary(simulated), shapes(simulated)) == (summary(real), shapes(real)):
            break
    assert summary(simulated) == summary(real)
    assert shapes(simulated) == shapes(real)


@pytest.mark.parametrize("body", [QUESTION, TOOL, {**TOOL, "include_reasoning": False}, {**QUESTION, **PLAIN, "return_token_ids": True}])
def test_single_tokens_are_derendered_with_the_same_fields(clients: Clients, body: Body) -> None:
    real, simulated = (derendered(client, body) for client in clients)
    assert real.keys() == simulated.keys()
    assert simulated == real


@pytest.mark.parametrize("body", [QUESTION, TOOL, {**QUESTION, **PLAIN}], ids=["reasoning", "a tool", "plain"])
def test_streams_with_token_ids_have_the_same_frames(clients: Clients, body: Body) -> None:
    """Events with an empty delta show tokens that a parser has buffered. Where they are depends on the parser's markup."""
    for _ in range(5):
        real, simulated = (client.post(CHAT, json={**body, "stream": True, "return_token_ids": True}).text for client in clients)
        if frames(simulated) == frames(real):
            break
    assert without_empty(simulated) == without_empty(real)
    assert frames(simulated) == frames(real)
    assert body is not TOOL or "0 empty" in frames(real)


@pytest.mark.parametrize(("path", "body"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_worded_the_same(clients: Clients, path: str, body: Body) -> None:
    real, simulated = both(clients, path, json=body)
    assert real.status_code >= 400
    assert worded(simulated.text) == worded(real.text)


def rendered(client: httpx2.Client, body: Body) -> Body:
    found: Body = client.post(RENDER, json=body).json()
    return found


def shapes(text: str) -> dict[str, Any]:
    """The shapes of a stream's events by kind, the first event alone."""
    first, *others = events(text)
    return {"first": shape(first[1]), **{kind(name, data): shape(data) for name, data in others}}


def without_empty(text: str) -> list[str]:
    kinds = [each for each in summary(text) if each != "0 empty"]
    return [each for at, each in enumerate(kinds) if at == 0 or each != kinds[at - 1]]


def derendered(client: httpx2.Client, body: Body) -> dict[str, Any]:
    """Generate a response, derender its tokens one by one and then its usage, and return the shapes by what a chunk shows."""
    request = rendered(client, body)
    generated = client.post(GENERATE, json=request).json()
    ids = generated["choices"][0]["token_ids"]
    chunks: list[Body] = [{"choices": [{"index": 0, "token_ids": [each]}]} for each in ids]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    state, found = None, {}
    for chunk in [*chunks, {"choices": [], "usage": generated["usage"]}]:
        sent = {"stream": True, "generate_chunk": chunk, "stream_state": state, "prompt_token_ids": request["token_ids"]}
        response = client.post(DERENDER, json={**sent, "chat_request": body})
        assert response.status_code == 200, response.text
        chunk, state = response.json()["chunk"], response.json()["stream_state"]
        found[shown(chunk)] = shape(chunk)
    assert state is not None
    return {**found, "state": shape(state), "tools": state["tools_streamed"], "calls": len(state["last_tool_call_ids"])}


def shown(chunk: Body) -> str:
    """Return the fields that a chunk shows."""
    if not chunk["choices"]:
        return "usage"
    [choice] = chunk["choices"]
    calls = [name for call in choice["delta"].get("tool_calls") or () for name, value in call["function"].items() if value is not None]
    fields = [name for name, value in choice["delta"].items() if value]
    return " ".join([*fields, *calls, *([choice["finish_reason"]] if choice["finish_reason"] else [])])
